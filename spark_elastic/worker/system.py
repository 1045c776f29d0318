"""System: everything that a worker's control connection needs from its process and the network. Does not need torch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from spark_elastic.protocol.connection import Connection, connect
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.worker.sockets import keep_from_children


async def _connect(addresses: list[tuple[str, int]], credentials: Credentials, expected: object) -> Connection:
    """Connect to the driver. A worker has this one control connection in its life."""
    connection = await connect(addresses, credentials, expected)
    keep_from_children(connection)
    return connection


class Threads(Protocol):
    """The parts of Python's module ``threading`` that a worker uses."""

    @property
    def Thread(self) -> type[threading.Thread]:  # noqa: N802
        """Make a thread."""
        ...

    @property
    def Condition(self) -> Callable[[], threading.Condition]:  # noqa: N802
        """Make a condition, with a lock of its own."""
        ...

    @property
    def Event(self) -> type[threading.Event]:  # noqa: N802
        """Make an event."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Clock, threads, process and network of a worker. The defaults are the real ones; the simulation passes in its own."""

    # A clock in seconds that never goes back.
    clock: Callable[[], float] = time.monotonic
    # The module ``threading``, and the class of futures by which one thread hands a result to another.
    threads: Threads = threading
    future: Callable[[], concurrent.futures.Future[Any]] = concurrent.futures.Future
    # The control thread's event loop, and how other threads call into it.
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    call_in_loop: Callable[..., concurrent.futures.Future[object]] = asyncio.run_coroutine_threadsafe
    # The id of the process, and the function that ends it.
    pid: Callable[[], int] = os.getpid
    exit: Callable[[int], object] = os._exit
    # How the driver is reached.
    connect: Callable[..., Awaitable[Connection]] = _connect


REAL_SYSTEM = System()
