"""ClientDriver: how a job that ends by itself, by its platform or by Ctrl-C is told to whoever called run()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spark_elastic.driver import client_driver, service
from spark_elastic.driver.client_driver import ClientDriver
from spark_elastic.driver.driver_place import CheckpointWish
from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import CheckpointError, JobCancelledError, NotEnoughHostsError, TrainingFailedError
from spark_elastic.launchers.base import SlotListener
from spark_elastic.launchers.defaults import fill_sizes
from spark_elastic.protocol.records import Entry, JobStarted
from spark_elastic.protocol.ticket import Ticket


@pytest.fixture(autouse=True)
def timeouts_are_seen_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TICK_SECONDS", 0.02)


class Platform:
    """Has slots on which no task ever runs, and does on entry what a test wants to happen to them."""

    platform, memory_setting, application, bind_address = "a played cluster", None, "application", "127.0.0.1"

    def __init__(self, happens: Callable[[SlotListener], object] = lambda listener: None, end: str = "") -> None:
        self._happens, self._end = happens, end
        self.life: list[str] = []
        self.ticket: Any = None

    def addresses(self, port: int) -> tuple[tuple[str, int], ...]:
        return (("127.0.0.1", port),)

    def sizes(self, *given: int | None) -> tuple[int, int, int]:
        return fill_sizes(3, *given)

    def launch(self, ticket: Ticket, slots: int, listener: SlotListener) -> Any:
        self.ticket, self._listener = ticket, listener
        self.life.append(f"{slots} slots")
        return self

    def __enter__(self) -> Platform:
        self.life.append("entered")
        self._happens(self._listener)
        return self

    def __exit__(self, *raised: object) -> None:
        self.life.append("left")

    def find_end(self) -> str:
        return self._end

    def submit_no_more(self) -> None:
        self.life.append("no more")


def run(platform: Any, wish: CheckpointWish | None = None, start_timeout: float = 0.1) -> list[Entry]:
    """Run a job that no task comes to; return what was recorded if ``run`` does, which it does not."""
    settings = JobSettings(min_np=2, num_proc=2, max_np=2, start_timeout=start_timeout, yield_after=1000.0)
    entries: list[Entry] = []
    with EventLog(None, [entries.append]) as log:
        ClientDriver(wish).run(platform, settings, b"call", log, OutputPrinter())
    return entries


def test_all_slots_are_for_workers() -> None:
    platform: Any = Platform()
    assert ClientDriver(None).sizes(platform, None, None, None) == (3, 3, 3)
    assert ClientDriver(None).own_slots == 0


def test_its_check_is_whether_the_checkpoint_can_be_written_and_starts_nothing() -> None:
    platform: Any = Platform()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        ClientDriver(CheckpointWish("odd://bucket", 1.0)).check(platform, None)
    ClientDriver(None).check(platform, None)
    assert platform.life == []


def test_the_jobs_own_error_is_raised_and_no_task_is_started_again_before_the_slots_are_left() -> None:
    platform = Platform()
    with pytest.raises(NotEnoughHostsError):
        run(platform)
    assert platform.life == ["2 slots", "entered", "no more", "left"]
    ((host, port),) = platform.ticket.addresses
    assert host == "127.0.0.1"
    assert port > 0


def test_a_platform_that_has_ended_is_the_cause_of_what_the_job_died_of() -> None:
    with pytest.raises(JobCancelledError, match="cannot go on in a played cluster: its owner ended it") as raised:
        run(Platform(end="its owner ended it"))
    assert isinstance(raised.value.__cause__, NotEnoughHostsError)


def test_slots_that_stop_end_the_job_at_once_with_their_reason() -> None:
    with pytest.raises(JobCancelledError, match="in a played cluster: Spark has stopped"):
        run(Platform(lambda listener: listener.on_stopped("Spark has stopped")), start_timeout=600.0)


def test_slots_that_can_never_run_fail_the_job_which_nobody_has_cancelled() -> None:
    with pytest.raises(TrainingFailedError, match="cannot go on in a played cluster: executors have no torch"):
        run(Platform(lambda listener: listener.on_failed("executors have no torch")), start_timeout=600.0)


def test_why_a_slot_was_given_up_is_told_where_too_few_are_left() -> None:
    with pytest.raises(NotEnoughHostsError, match="given up: its Python has no torch"):
        run(Platform(lambda listener: listener.on_given_up(1, "its Python has no torch")))


def test_ctrl_c_ends_the_job_and_leaves_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[SparkDriverService] = []

    def interrupt(started: SparkDriverService) -> list[bytes]:
        services.append(started)
        raise KeyboardInterrupt

    monkeypatch.setattr(client_driver, "_await", interrupt)
    platform = Platform()
    with pytest.raises(KeyboardInterrupt):
        run(platform, start_timeout=600.0)
    assert platform.life[-2:] == ["no more", "left"]
    with pytest.raises(JobCancelledError, match="was interrupted"):
        services[0].outcome.result(10)


def test_a_checkpoint_is_claimed_once_the_driver_listens_and_is_in_the_first_event(tmp_path: Any) -> None:
    entries: list[Entry] = []
    settings = JobSettings(min_np=1, num_proc=1, max_np=1, start_timeout=0.1, yield_after=1000.0)
    platform: Any = Platform()
    with EventLog(None, [entries.append]) as log, pytest.raises(NotEnoughHostsError):
        ClientDriver(CheckpointWish(str(tmp_path / "saved"), 1.0)).run(
            platform, settings, b"call", log, OutputPrinter()
        )
    first = entries[0].record
    assert isinstance(first, JobStarted)
    assert (first.run_id, first.attempt) == (platform.ticket.run_id, 1)
