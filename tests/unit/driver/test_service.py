"""The driver's service as a part of its process: how it starts, ends and is told things from other threads.

What it says to tasks and workers is in tests/integration/test_driver_service.py.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from threads import find_thread

from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import JobCancelledError, NotEnoughHostsError
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.protocol.records import Entry, JobFailed

CREDENTIALS = create_credentials("test")


def is_running() -> bool:
    return any(thread.name == "spark_elastic-driver" for thread in threading.enumerate())


@pytest.fixture
def service() -> Iterator[SparkDriverService]:
    settings = JobSettings(start_timeout=600.0)
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1") as service:
        yield service


def test_it_listens_from_the_beginning_and_nothing_is_left_at_the_end() -> None:
    with SparkDriverService(JobSettings(), CREDENTIALS, bind_address="127.0.0.1") as service:
        assert find_thread("spark_elastic-driver").is_alive()
        socket.create_connection(("127.0.0.1", service.port), 10).close()
    assert not is_running()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", service.port), 10)


def test_what_runs_on_the_loop_is_returned_and_raised_to_who_called_from_another_thread(
    service: SparkDriverService,
) -> None:
    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise LookupError("nothing there")

    assert service.call(name()) == "spark_elastic-driver"
    with pytest.raises(LookupError, match="nothing there"):
        service.call(fail())


def test_the_first_error_is_the_outcome_and_is_recorded_once() -> None:
    entries: list[Entry] = []
    with (
        EventLog(None, [entries.append]) as log,
        SparkDriverService(JobSettings(), CREDENTIALS, bind_address="127.0.0.1", event_log=log) as service,
    ):
        service.cancel(JobCancelledError("first"))
        service.cancel(JobCancelledError("second"))
        with pytest.raises(JobCancelledError, match="first"):
            service.outcome.result(10)
        service.call(asyncio.sleep(0))
    # The log has now handed on all entries, on its own thread.
    assert [entry.record.message for entry in entries if isinstance(entry.record, JobFailed)] == ["first"]


def test_what_is_said_of_slots_and_machines_that_nobody_has_is_no_trouble(service: SparkDriverService) -> None:
    service.drain_slot(7)
    service.hosts_listed({"a": 1})
    service.slot_given_up(0, "its Python has no torch")
    service.call(asyncio.sleep(0))
    assert not service.outcome.done()


def test_a_time_that_nobody_reports_is_noticed_by_the_services_own_clock() -> None:
    settings = JobSettings(start_timeout=0.1, yield_after=1000.0)
    with (
        SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1") as service,
        pytest.raises(NotEnoughHostsError),
    ):
        service.outcome.result(10)


def test_who_comes_when_the_job_is_over_is_refused_though_the_service_is_still_there(
    service: SparkDriverService,
) -> None:
    service.stop_serving()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", service.port), 10)
