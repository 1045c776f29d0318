"""The control network: connections between machines and the driver, with delays, losses and partitions.

Messages of one connection arrive in order, those of different connections in any order. Real frames travel: the sender encodes
them, and the receiver decodes them against its schema.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from simulation.world.universe import Universe
from spark_elastic.protocol import connection
from spark_elastic.protocol import messages as m

# After how many seconds without an answer the kernel gives up a connection (see ``connection._notice_lost_hosts``).
GIVEN_UP_SECONDS = 30.0

_decoders = {id(kind): msgspec.msgpack.Decoder(kind) for kind in (m.ToDriver, m.ToTask, m.ToWorker)}
_END = None


class End:
    """One end of a connection, with everything that our code uses of ``connection.Connection``."""

    local_address = peer_address = "10.0.0.1"
    descriptor = -1
    crowded = False

    def __init__(self, link: Link, process: Any) -> None:
        self.link = link
        self.process = process
        self.peer: End
        self.expected: Any = None
        self.open = True
        self._inbox: deque[bytes | None] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._last_arrival = 0.0

    # ------------------------------------------------------------------ for our code

    def send(self, message: m.Message) -> None:
        self.send_encoded(connection.encode(message))

    def send_encoded(self, frame: bytes) -> None:
        if self.open and not self.process.loop.is_dead:
            self._transmit(frame)

    async def send_bytes(self, data: bytes | memoryview) -> None:
        for chunk in connection.chunks(data):
            self.send(chunk)

    async def receive(self) -> Any:
        while not self._inbox:
            self._waiting = waiting = asyncio.get_running_loop().create_future()
            try:
                await waiting
            finally:
                self._waiting = None
        frame = self._inbox.popleft()
        if frame is _END:
            self._inbox.append(_END)
            raise connection.ConnectionLostError("the connection broke")
        return _decoders[id(self.expected)].decode(memoryview(frame)[4:])

    async def messages(self) -> AsyncIterator[Any]:
        while True:
            try:
                message = await self.receive()
            except connection.ConnectionLostError:
                return
            yield message

    async def close(self, flush_seconds: float = 1.0) -> None:
        self.abort()

    def abort(self) -> None:
        if self.open:
            self.open = False
            self._transmit(_END)
            self._arrive(_END)

    # ------------------------------------------------------------------ for the simulation

    def _transmit(self, frame: bytes | None) -> None:
        link = self.link
        if link.held is not None:
            link.held.append((self, frame))
            return
        simulation = link.simulation
        delay = simulation.delay(link)
        arrival = max(self._last_arrival, simulation.clock.now + delay)
        self._last_arrival = arrival
        simulation.clock.after(arrival - simulation.clock.now, self.peer._arrive, frame, link.epoch)

    def _arrive(self, frame: bytes | None, epoch: int | None = None) -> None:
        """Take a frame into the kernel's buffer. Whoever waits for it is woken once its process runs."""
        if epoch is not None and epoch != self.link.epoch:
            return
        self._inbox.append(frame)
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Link:
    """A connection of a task or a worker (``client``) to the driver (``server``)."""

    def __init__(self, simulation: Universe, client: Any, server: Any) -> None:
        self.simulation = simulation
        self.client = End(self, client)
        self.server = End(self, server)
        self.client.peer, self.server.peer = self.server, self.client
        self.epoch = 0
        # Frames that wait for the end of a partition.
        self.held: list[tuple[End, bytes | None]] | None = None
        self.lag = 0.0
        client.links.append(self)
        if simulation.is_cut(client.machine):
            self.cut()

    def lose(self) -> None:
        """Break the connection: both ends notice, and frames on their way are lost."""
        self.epoch += 1
        self.held = None
        for end in (self.client, self.server):
            self.simulation.clock.after(self.simulation.random.uniform(0, 0.5), end._arrive, _END)
            end.open = False

    def cut(self) -> None:
        """Take down the network between the ends."""
        if self.held is None:
            self.held = []
            self.simulation.clock.after(GIVEN_UP_SECONDS, self._give_up, self.epoch, self.held)

    def mend(self) -> None:
        held, self.held = self.held, None
        for end, frame in held or ():
            end._transmit(frame)

    def _give_up(self, epoch: int, held: list[Any]) -> None:
        if epoch == self.epoch and self.held is held:
            self.lose()


class Door:
    """The driver's listening socket, with everything that our code uses of ``door.Door``."""

    port = 1

    def __init__(self, accepted: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> None:
        self.accepted = accepted
        self.visits: set[asyncio.Task[None]] = set()
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


async def connect(simulation: Universe, process: Any, addresses: Any, credentials: Any, expected: Any) -> Any:
    """Connect to the driver. Raises ``OSError``s as ``connection.connect`` does."""
    await asyncio.sleep(simulation.random.uniform(0.001, 0.02))
    if simulation.is_cut(process.machine):
        await asyncio.sleep(GIVEN_UP_SECONDS)
        raise TimeoutError("the driver did not answer")
    if not simulation.door.is_open:
        raise ConnectionRefusedError("nobody listens")
    link = Link(simulation, process, simulation.driver)
    link.client.expected = expected
    accepted = asyncio.get_running_loop().create_future()
    simulation.clock.soon(_accept, simulation, link, accepted, loop=simulation.driver.loop)
    try:
        # The handshake needs the driver's process, which may be paused.
        await asyncio.wait_for(accepted, connection.HANDSHAKE_SECONDS)
    except asyncio.TimeoutError as error:
        link.lose()
        raise TimeoutError("no handshake") from error
    return link.client


def _accept(simulation: Universe, link: Link, accepted: asyncio.Future[None]) -> None:
    end: Any = link.server  # stands in for reader and writer
    if simulation.door.is_open:
        visit = simulation.driver.loop.create_task(simulation.door.accepted(end, end))
        simulation.door.visits.add(visit)
        visit.add_done_callback(simulation.door.visits.discard)
    else:
        link.lose()
    if not accepted.done():
        simulation.clock.after(simulation.random.uniform(0.0005, 0.005), _resolve, accepted)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
