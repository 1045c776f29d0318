"""Reading event logs: whole ones, and a line at a time, as whoever follows a running job does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import story

from spark_elastic.cli import main
from spark_elastic.protocol import records
from spark_elastic.protocol.records import DriverPaused, Entry
from spark_elastic.timeline.event_log import choose_run, read_events, read_line
from spark_elastic.timeline.history import read_history

LINE = json.dumps({"version": 1, "time": 5.0, "event": "driver_paused", "seconds": 1.5})


def test_a_line_is_an_entry() -> None:
    assert read_line(LINE + "\n") == Entry(5.0, DriverPaused(1.5))


@pytest.mark.parametrize("length", [0, 1, len(LINE) - 1])
def test_a_line_that_is_still_being_written_is_told_from_one_that_is_no_event(length: int) -> None:
    with pytest.raises(json.JSONDecodeError):
        read_line(LINE[:length])
    with pytest.raises(ValueError, match="no event of spark_elastic") as no_event:
        read_line('{"event": 3}')
    assert not isinstance(no_event.value, json.JSONDecodeError)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no run"),
        ("hello\n", "line 1: not an event"),
        ('{"version": 99, "time": 0, "event": "job_started"}\n', "has version 99"),
        ('{"version": 1, "time": 0, "event": "driver_paused", "seconds": 1}\n', "holds no run"),
        ('{"version": 1, "time": 0, "event": "driver_paused"}\n', "line 1: no event of spark_elastic: Object missing"),
    ],
)
def test_what_is_no_event_log_is_refused(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(text)
    assert main(["summary", str(tmp_path / "log")]) == 2
    assert complaint in capsys.readouterr().err


def test_the_log_of_a_driver_that_was_killed_is_read_up_to_the_line_that_was_cut(log: Path) -> None:
    log.write_text(log.read_text()[:-30])
    assert read_history(choose_run(read_events(log))).outcome == "is not over in this log"


def test_of_a_log_with_several_runs_the_last_one_is_shown_or_the_one_that_is_named(log: Path) -> None:
    log.write_text(log.read_text() + log.read_text().replace("abcd", "efgh"))
    events = read_events(log)
    assert _run_id(choose_run(events)) == "efgh"
    assert _run_id(choose_run(events, "abcd")) == "abcd"
    with pytest.raises(ValueError, match="abcd, efgh"):
        choose_run(events, "other")


def _run_id(entries: list[Entry]) -> str:
    assert isinstance(entries[0].record, records.JobStarted)
    return entries[0].record.run_id


def test_an_event_without_a_field_that_it_always_had_is_refused_by_its_line(tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in story.killed()]
    lines[1] = json.dumps({"version": 1, "time": 1001.0, "event": "worker_starting", "worker": 0})
    (tmp_path / "log").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"line 2: .* missing required field `host`"):
        read_events(tmp_path / "log")
