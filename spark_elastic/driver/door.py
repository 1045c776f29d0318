"""Door: the driver's listening socket, at which strangers may knock as often as they like.

A TLS handshake takes some 300 KiB until the peer has shown the job's certificate, so only a few are in progress at a time. The
other connections wait, each holding a descriptor, of which the process that calls ``run`` needs some, too. Addresses take turns,
and for each address the latest connection goes first, so that a peer that arrives after a flood of connections does not have to
wait for all of them. A slow handshake is cut off when other connections wait.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import psutil

from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.connection import HANDSHAKE_SECONDS
from spark_elastic.protocol.credentials import Credentials

logger = logging.getLogger("spark_elastic")

T = TypeVar("T")
# The errors of an address that is none of this machine. Only Spark's setting names such a one.
_OF_ADDRESSES = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
# The errors of a machine or process that can open no more connections.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
MOST_WAITING = 1024
Accepted = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[object, object, None]]


def _most_waiting() -> int:
    """Return 1,024, or three quarters of the descriptors that this process may still open if that is less.

    All tasks and workers of a job may come at once, and need these descriptors afterwards, too.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_WAITING
    left: int = soft - psutil.Process().num_fds()
    return max(1, min(MOST_WAITING, left * 3 // 4))


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """How many handshakes run at a time, how many connections may wait, and how long a handshake may take while others wait."""

    handshakes: int = 64
    waiting: int = field(default_factory=_most_waiting)
    hurried_seconds: float = 2.0


class WaitingLine(Generic[T]):
    """The waiting connections, by address. When the line is full, the address with the most connections loses one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._by_address: OrderedDict[str, list[T]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def join(self, address: str, who: T) -> T | None:
        """Add a connection to the line of its address. Return the connection to close if there are too many now, else None."""
        self._by_address.setdefault(address, []).append(who)
        self._count += 1
        return None if self._count <= self._limit else self.give_up()

    def give_up(self) -> T:
        """Take the connection that waits longest at the address with the most out of the line, which must not be empty."""
        most = max(self._by_address, key=lambda address: len(self._by_address[address]))
        return self._take(most, 0)

    def call(self) -> T:
        """Take the next connection out of the line, which must not be empty."""
        address = next(iter(self._by_address))
        who = self._take(address, -1)
        if address in self._by_address:
            self._by_address.move_to_end(address)
        return who

    def _take(self, address: str, place: int) -> T:
        there = self._by_address[address]
        who = there.pop(place)
        if not there:
            del self._by_address[address]
        self._count -= 1
        return who


class Door:
    """Accepts connections from ``open`` to ``close``, on the loop that called ``open``; owns the listening socket.

    ``accepted`` runs as a task for each connection whose handshake is done; no such task begins once ``close`` has returned.
    """

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, accepted: Accepted, limits: DoorLimits | None = None
    ) -> None:
        self._listener = listener
        self._context = context
        self._accepted = accepted
        # The tasks of accepted connections, until they end. Others only read this.
        self.visits: set[asyncio.Task[None]] = set()
        self._limits = limits or DoorLimits()
        self._line: WaitingLine[socket.socket] = WaitingLine(self._limits.waiting)
        # Handshakes in progress and when they began, the oldest first.
        self._shaking: dict[asyncio.Task[None], float] = {}
        self._hurry: asyncio.TimerHandle | None = None
        self._warned: set[str] = set()
        self._loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        """The port that the door listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def handshakes(self) -> int:
        """How many handshakes are in progress."""
        return len(self._shaking)

    @property
    def waiting(self) -> int:
        """How many connections wait for a handshake."""
        return len(self._line)

    def open(self) -> None:
        """Listen. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._knocked)

    def close(self) -> None:
        """Refuse peers that have not shown the job's certificate yet; accepted connections stay open."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._hurry is not None:
            self._hurry.cancel()
        while self._line:
            self._line.call().close()
        for task in self._shaking:
            task.cancel()

    def _knocked(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if self._line and error.errno in _EXHAUSTED:
                self._line.give_up().close()  # the loop calls this method again
                self._warn(f"a connection cannot be accepted: {error}", "some that wait for a handshake are closed")
                return
            # The kernel keeps new connections waiting in the meantime.
            logger.warning("a connection cannot be accepted: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(1.0, self._listen_again)
            return
        connection.setblocking(False)
        turned_away = self._line.join(str(peer[0]), connection)
        if turned_away is not None:
            turned_away.close()
            self._warn(
                f"more than {self._limits.waiting} connections wait for a handshake",
                f"the last is from {peer[0]}, and some are closed",
            )
        self._let_in()

    def _warn(self, what: str, more: str) -> None:
        """Warn of each cause once."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s; %s", what, more)

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._knocked)

    def _let_in(self) -> None:
        while self._line:
            if len(self._shaking) >= self._limits.handshakes:
                oldest, begun = next(iter(self._shaking.items()))
                left = begun + self._limits.hurried_seconds - self._loop.time()
                if left > 0:
                    if self._hurry is None:
                        self._hurry = self._loop.call_later(left, self._hurried)
                    return
                del self._shaking[oldest]
                oldest.cancel()
            connection = self._line.call()
            task = self._loop.create_task(self._shake_hands(connection))
            self._shaking[task] = self._loop.time()
            task.add_done_callback(partial(self._shook, connection))

    def _hurried(self) -> None:
        self._hurry = None
        self._let_in()

    def _shook(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._shaking.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            connection.close()
        self._let_in()

    async def _shake_hands(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(), partial(self._shown, task))

        await self._loop.connect_accepted_socket(
            protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )

    def _shown(self, handshake: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelling the task from now on would close the connection of a peer that is in.
        self._shaking.pop(handshake, None)
        if self._listener.fileno() < 0:
            writer.transport.abort()  # the handshake ended in the very turn of the loop that closed the door
            return
        visit = self._loop.create_task(self._accepted(reader, writer))
        self.visits.add(visit)
        visit.add_done_callback(self.visits.discard)


def open_door(address: str, port: int, credentials: Credentials, accepted: Accepted) -> Door:
    """Listen, as ``listen`` does, and open a door for peers that have the job's certificate. Called on the event loop."""
    door = Door(listen(address, port), credentials.server_context(), accepted)
    door.open()
    return door


def listen(address: str, port: int) -> socket.socket:
    """Listen on a port of ``address``, or of every address of this machine, IPv4 and IPv6, if ``address`` is empty."""
    host = address.strip("[]")
    every_address = host in ("", "0.0.0.0", "::")
    try:
        if every_address and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # An errno below zero is that of a name that does not resolve.
        is_address = (error.errno or 0) < 0 or error.errno in _OF_ADDRESSES
        remedy = (
            "set spark.driver.bindAddress to an address of this machine" if is_address else "choose another driver_port"
        )
        raise SparkElasticError(
            f"the driver cannot listen on {host or 'any address'}, port {port or 'any'}: {error}; {remedy}"
        ) from error
