"""EventLog: every event reaches the file and the callable, in order, and neither can harm the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.driver.event_log import EventLog


def test_events_are_written_as_json_lines_in_order(tmp_path: Path) -> None:
    with EventLog(str(tmp_path / "log"), None) as log:
        for number in range(5):
            log.record("metrics", number=number)
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [event["number"] for event in events] == [0, 1, 2, 3, 4]
    assert {event["event"] for event in events} == {"metrics"}


def test_an_event_log_is_appended_to(tmp_path: Path) -> None:
    for _ in range(2):
        with EventLog(str(tmp_path / "log"), None) as log:
            log.record("job_started")
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_callable_that_raises_is_called_no_more(tmp_path: Path) -> None:
    calls: list[Any] = []

    def on_event(event: dict[str, Any]) -> None:
        calls.append(event)
        raise ValueError("mine")

    with EventLog(str(tmp_path / "log"), on_event) as log:
        log.record("one")
        log.record("two")
    assert len(calls) == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="on_event"):
        EventLog(None, 3)


def test_a_full_disk_costs_the_log_and_nothing_else() -> None:
    """Found in review: the thread dies of it, on_event with it, and leaving raises after a job that went well."""
    calls: list[Any] = []
    with EventLog("/dev/full", calls.append) as log:
        log.record("one")
        log.record("two")
    assert [event["event"] for event in calls] == ["one", "two"]
