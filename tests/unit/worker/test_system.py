"""System: the control connection of a real worker is its own, and ends with it."""

from __future__ import annotations

import asyncio
import os

from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.protocol import messages as m
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.worker.system import REAL_SYSTEM


def test_a_process_that_a_worker_forks_does_not_hold_the_workers_connection() -> None:
    """Else the driver would not see the end of a worker whose DataLoader's processes live on."""
    credentials = create_credentials("test")

    async def is_open_in_child(port: int) -> tuple[bool, bool]:
        connection = await REAL_SYSTEM.connect([("127.0.0.1", port)], credentials, m.ToWorker)
        descriptor = connection.descriptor
        is_open = os.path.exists(f"/proc/self/fd/{descriptor}")
        child = os.fork()
        if child == 0:
            os._exit(int(os.path.exists(f"/proc/self/fd/{descriptor}")))
        _, status = os.waitpid(child, 0)
        connection.abort()
        return is_open, bool(os.waitstatus_to_exitcode(status))

    with SparkDriverService(JobSettings(), credentials, bind_address="127.0.0.1") as service:
        here, in_child = asyncio.run(is_open_in_child(service.port))
        service.stop_serving(release_seconds=0.0)
    assert here
    assert not in_child
