"""System: the control connection of a real worker is its own, and ends with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import Connection
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.worker.system import REAL_SYSTEM

CREDENTIALS = create_credentials("test")


@pytest.fixture
def port() -> Iterator[int]:
    with SparkDriverService(JobSettings(), CREDENTIALS, bind_address="127.0.0.1") as service:
        yield service.port
        service.stop_serving(release_seconds=0.0)


def is_open(descriptor: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")


def is_open_in_child(descriptor: int) -> bool:
    if (child := os.fork()) == 0:
        os._exit(int(is_open(descriptor)))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_a_process_that_a_worker_forks_does_not_hold_the_workers_connection(port: int) -> None:
    """Else the driver would not see the end of a worker whose DataLoader's processes live on."""

    async def look() -> tuple[bool, bool]:
        connection = await REAL_SYSTEM.connect([("127.0.0.1", port)], CREDENTIALS, m.ToWorker)
        descriptor = connection.descriptor
        found = is_open(descriptor), is_open_in_child(descriptor)
        connection.abort()
        return found

    assert asyncio.run(look()) == (True, False)


def test_what_has_got_the_number_of_a_closed_connection_stays_open_in_children(port: int) -> None:
    """A pipe to a DataLoader's worker, for example, once the driver has gone."""

    async def close() -> tuple[Connection, int]:
        connection = await REAL_SYSTEM.connect([("127.0.0.1", port)], CREDENTIALS, m.ToWorker)
        descriptor = connection.descriptor
        await connection.close()
        return connection, descriptor

    connection, descriptor = asyncio.run(close())
    with open(os.devnull) as file:
        os.dup2(file.fileno(), descriptor)
        assert is_open_in_child(descriptor)
        os.close(descriptor)
    assert connection.descriptor == -1
