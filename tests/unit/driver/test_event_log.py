"""EventLog: every event reaches the file and the callable, in order, and neither can harm the job."""

from __future__ import annotations

import json
import os
import select
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from other_processes import wait_until
from threads import find_thread

from spark_elastic.driver import event_log
from spark_elastic.driver.event_log import EventLog, LogFile, OnEvent
from spark_elastic.errors import TrainingFailedError
from spark_elastic.protocol.event_format import as_event
from spark_elastic.protocol.records import DriverPaused, Entry, JobFailed, JobFinished, JobStarted, Record, RunAgain
from spark_elastic.timeline.event_log import choose_run, read_events

ONE, TWO = RunAgain(1), DriverPaused(2.0)


def test_events_are_written_as_json_lines_in_order(tmp_path: Path) -> None:
    with EventLog(LogFile(tmp_path / "log")) as log:
        for number in range(5):
            log.record(RunAgain(number))
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [event["generation"] for event in events] == [0, 1, 2, 3, 4]
    assert {event["event"] for event in events} == {"run_again"}


def test_an_event_log_is_appended_to(tmp_path: Path) -> None:
    for _ in range(2):
        with EventLog(LogFile(tmp_path / "log")) as log:
            log.record(ONE)
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_line_that_was_cut_off_does_not_swallow_the_next_run(tmp_path: Path) -> None:
    """The next run seemed to be a part of the one before, which seemed to have finished."""
    path = tmp_path / "log"
    for text in ("", "one\n", "one\ntw"):
        path.write_text(text)
        with EventLog(LogFile(path)) as log:
            log.record(ONE)
        *before, last = path.read_text().splitlines()
        assert before == text.splitlines()
        assert json.loads(last)["generation"] == 1


def test_on_event_finds_in_the_file_what_it_is_called_with(tmp_path: Path) -> None:
    """It was called at the same time: a page that it asked for, or a copy of the file at the end, lacked the event."""
    path = tmp_path / "log"
    lines_at: list[int] = []

    class SlowFile(LogFile):
        def take(self, event: dict[str, Any]) -> None:
            called.wait(0.2)
            super().take(event)

    called = threading.Event()

    def look(_: dict[str, Any]) -> None:
        lines_at.append(len(path.read_text().splitlines()))
        called.set()

    with EventLog(OnEvent(look)) as caller, EventLog(SlowFile(path), [caller.pass_on]) as log:
        log.record(ONE)
    assert lines_at == [1]


def test_a_log_that_is_no_file_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with EventLog(LogFile(tmp_path / "pipe")) as log:
        log.record(ONE)
    assert json.loads(os.read(end, 1000))["generation"] == 1
    os.close(end)


def test_events_of_jobs_that_write_one_log_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog(LogFile(path)) as one, EventLog(LogFile(path)) as other:
        for number, (log, name) in enumerate([(one, "first"), (other, "second")] * 2):
            log.record(JobStarted(name, 1, 1, 1, None, "app") if number < 2 else RunAgain(number))
            wait_until(lambda: len(path.read_text().splitlines()) == number + 1, "the event")  # noqa: B023
    entries = read_events(str(path))
    assert [entry.run for entry in entries] == ["first", "second"] * 2
    for name, generation in (("first", 2), ("second", 3)):
        started, again = choose_run(entries, name)
        assert (started.record.run_id, again.record) == (name, RunAgain(generation))  # type: ignore[union-attr]
    assert choose_run(entries) == choose_run(entries, "second")
    assert choose_run(entries[1:]) == choose_run(entries, "second"), "what is left of the first belongs to no other"
    edited = msgspec.structs.replace(entries[0], run="other")
    assert choose_run([edited]) == [edited], "a run begins with its own beginning"


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_callable_that_raises_is_called_no_more(error: type[BaseException]) -> None:
    calls: list[Any] = []

    def on_event(event: dict[str, Any]) -> None:
        calls.append(event)
        raise error("mine")

    seen: list[Record] = []
    with EventLog(OnEvent(on_event), [lambda entry: seen.append(entry.record)]) as log:
        log.record(ONE)
        log.record(TWO)
    assert len(calls) == 1
    assert seen == [ONE, TWO], "watchers are called as before"


@pytest.mark.parametrize("end", [JobFinished([], 0), JobFailed("ValueError", "mine")])
def test_the_end_of_the_job_is_the_last_event(end: Record) -> None:
    """Reports of workers that had not heard of it came after it."""
    calls: list[Any] = []
    with EventLog(OnEvent(calls.append)) as log:
        for record in (ONE, end, TWO, end):
            log.record(record)
    assert calls == [as_event(Entry(event["time"], record)) for event, record in zip(calls, (ONE, end), strict=True)]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TrainingFailedError("rank 0 raised"), ("TrainingFailedError", "rank 0 raised")),
        (OSError("no more threads"), ("OSError", "no more threads")),
        (KeyboardInterrupt(), ("JobCancelledError", "run() was interrupted")),
    ],
)
def test_a_run_that_fails_has_its_end_told_once_and_one_that_has_not_begun_has_none(
    error: BaseException, told: tuple[str, str]
) -> None:
    calls: list[Any] = []
    with EventLog(OnEvent(calls.append)) as log:
        log.failed(error)
        log.record(JobStarted("r", 1, 1, 1, None, "a"))
        log.failed(error)
        log.failed(error)
    assert [event["event"] for event in calls] == ["job_started", "job_failed"]
    assert (calls[-1]["error"], calls[-1]["message"]) == told


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="on_event"):
        OnEvent(3)  # type: ignore[arg-type]


def test_a_full_disk_costs_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Found in review: the thread dies of it, watchers with it, and leaving raises after a job that went well."""
    seen: list[Record] = []
    with EventLog(LogFile("/dev/full"), [lambda entry: seen.append(entry.record)]) as log:
        log.record(ONE)
        log.record(TWO)
    assert seen == [ONE, TWO]
    assert caplog.text.count("the event log cannot be written") == 1
    assert "/dev/full" not in [file.path for file in psutil.Process().open_files()]


class Slow:
    """An ``on_event`` that takes its first event only when it is allowed to."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, event: dict[str, Any]) -> None:
        self.entered.set()
        assert self.may_go_on.wait(30)
        self.events.append(event)


def test_a_slow_callable_delays_nobody_and_what_is_dropped_is_counted_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "QUEUE_LIMIT", 10)
    slow = Slow()
    with EventLog(OnEvent(slow)) as log:
        log.record(TWO)
        assert slow.entered.wait(30)
        for number in range(100):
            log.record(RunAgain(number))
        slow.may_go_on.set()
    told = [event.get("generation", event["event"]) for event in slow.events]
    assert told == ["driver_paused", *range(10), "events_dropped"]
    assert slow.events[-1]["count"] == 90
    assert caplog.text.count("events are dropped") == 1


def test_after_a_crowd_events_are_taken_again_once_half_of_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "QUEUE_LIMIT", 10)
    told: list[str] = []
    asked, allowed = threading.Semaphore(0), threading.Semaphore(0)

    def on_event(event: dict[str, Any]) -> None:
        asked.release()
        assert allowed.acquire(timeout=30)
        told.append(event["event"])

    def take(count: int) -> None:
        """Have so many events taken; the next one is in hand then, and those after it wait."""
        allowed.release(count)
        for _ in range(count):
            assert asked.acquire(timeout=30)

    with EventLog(OnEvent(on_event)) as log:
        log.record(ONE)
        assert asked.acquire(timeout=30)
        for _ in range(13):
            log.record(ONE)  # three find no room
        take(5)
        log.record(ONE)  # nor does a fourth: half are left
        take(1)
        log.record(TWO)
        allowed.release(20)
    assert told == [*["run_again"] * 11, "events_dropped", "driver_paused"]


def test_a_callable_that_never_ends_does_not_keep_a_job_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "END_SECONDS", 0.1)
    slow = Slow()
    with EventLog(OnEvent(slow)) as log:
        thread = find_thread("spark_elastic-events")
        log.record(ONE)
        assert slow.entered.wait(30)
        log.record(TWO)
    assert "1 events were not handed on within 0.1 s: on_event is too slow" in caplog.text
    slow.may_go_on.set()
    thread.join(30)
    assert [event["event"] for event in slow.events] == ["run_again"]


def test_a_file_that_never_takes_its_lines_is_closed_by_its_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(event_log, "END_SECONDS", 0.1)
    os.mkfifo(path := tmp_path / "pipe")
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with EventLog(LogFile(path)) as log:
        thread = find_thread("spark_elastic-events")
        for _ in range(2000):  # more than a pipe holds
            log.record(ONE)
    assert "the file of the event log is too slow" in caplog.text
    while thread.is_alive():
        wait_until(lambda: not thread.is_alive() or select.select([end], [], [], 0)[0], "a line, or the end")
        os.read(end, 1 << 20)
    assert str(path) not in [file.path for file in psutil.Process().open_files()]
    os.close(end)
