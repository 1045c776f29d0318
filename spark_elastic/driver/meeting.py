"""How a client finds a driver that runs in a slot: through a post office in a process of its own on some executor.

Nobody knows in advance on which executor Spark will run the driver, and Spark returns nothing from a running task. So a first,
short task leaves this process behind and returns its address. The driver's task then leaves its own addresses there, and a
third task fetches them. The process ends once they have been fetched, when its executor ends, or when it has waited for too
long.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from spark_elastic.driver.door import listen
from spark_elastic.driver.post import Addresses, Fetch, PostOffice, Put, visit
from spark_elastic.launchers.connect import local_address
from spark_elastic.launchers.spark_task import find_executor
from spark_elastic.protocol.credentials import Credentials

# How many seconds the process stays after a fetch. If the fetching task is lost, another task fetches the addresses.
GRACE_SECONDS = 2.0
START_SECONDS = 60.0
# A route is looked up for an address with this port, and nothing is sent there, so any port will do.
SOME_PORT = 9


class Invitation(msgspec.Struct, frozen=True):
    """What the process is given on its standard input."""

    certificate: bytes
    private_key: bytes
    executor: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OpenMeeting:
    """What the first task does. ``spark_driver``: the host of Spark's own driver. ``seconds``: how long to wait for the rest."""

    credentials: Credentials
    spark_driver: str
    seconds: float

    def __call__(self, rows: Iterable[bytes]) -> list[bytes]:
        """Leave the process behind and return its addresses, encoded."""
        given = Invitation(self.credentials.certificate, self.credentials.private_key, find_executor(), self.seconds)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        said = subprocess.run(
            [sys.executable, "-m", "spark_elastic.driver.meeting"],
            input=msgspec.msgpack.encode(given),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            check=True,
            timeout=START_SECONDS,
        ).stdout
        return [msgspec.msgpack.encode(own_addresses(self.spark_driver, int(said)))]


@dataclass(frozen=True, slots=True)
class EndMeeting:
    """The function of a task that ends the process if no driver is going to come."""

    addresses: Addresses
    credentials: Credentials

    def __call__(self, rows: Iterable[bytes]) -> list[bytes]:
        """Leave a letter and fetch it, after which the process ends. A process that has already ended is no error."""
        with contextlib.suppress(OSError):
            for request in (Put(b""), Fetch(0)):
                visit(self.addresses, self.credentials, request)
        return []


def own_addresses(spark_driver: str, port: int) -> Addresses:
    """Return where other executors may reach a port of this machine."""
    hosts = (local_address(spark_driver, SOME_PORT), socket.gethostname())
    return tuple((host, port) for host in dict.fromkeys(hosts) if host)


def read_addresses(row: bytes) -> Addresses:
    """Read the addresses that ``OpenMeeting`` has returned."""
    return msgspec.msgpack.decode(row, type=Addresses)


def main() -> None:
    """Listen, print the port, and stay behind in a process that nobody waits for."""
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Invitation)
    listener = listen("", 0)
    print(listener.getsockname()[1], flush=True)
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    try:
        executor = os.pidfd_open(given.executor)
    except ProcessLookupError:
        return
    credentials = Credentials(given.certificate, given.private_key)
    with PostOffice(credentials, listener) as post:
        watched = select.poll()
        watched.register(executor, select.POLLIN)
        deadline = time.monotonic() + given.seconds
        # The loop polls because it waits for two things, only one of which is a descriptor.
        while time.monotonic() < deadline and not watched.poll(200):
            if post.taken.is_set():
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                post.taken.clear()


if __name__ == "__main__":
    main()
