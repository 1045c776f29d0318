"""DriverRuntime: what the driver's service is given from outside, and the machine that it asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from spark_elastic.driver.door import Accepted, Door, open_door
from spark_elastic.driver.machine import DriverMachine
from spark_elastic.driver.settings import JobSettings
from spark_elastic.protocol.connection import Connection
from spark_elastic.protocol.credentials import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverRuntime:
    """Clock, event loop, door, connections and machine. The defaults are the real ones; the simulation passes in its own."""

    # A clock in seconds that never goes back.
    clock: Callable[[], float] = time.monotonic
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    # Listens at an address and a port, and hands on the connections of peers that have the job's credentials.
    open_door: Callable[[str, int, Credentials, Accepted], Door] = open_door
    # Wraps the reader and writer of an accepted connection; the third argument says which messages may arrive.
    connection: Callable[..., Connection] = Connection
    machine: Callable[[JobSettings, float], DriverMachine] = DriverMachine


REAL_RUNTIME = DriverRuntime()
