"""Events are what was recorded, in this release and in later ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

from spark_elastic.protocol.event_format import as_event, as_line, read_event
from spark_elastic.protocol.records import DRIVER_RECORDS, Entry, WorkerReported
from spark_elastic.protocol.reports import REPORTS, Metrics


def test_what_is_written_is_what_was_recorded_once_it_is_read() -> None:
    """The first lines of a log, one of each kind. Fields that a later release adds have defaults, so that they are read."""
    events = [json.loads(line) for line in (Path(__file__).parent / "first.jsonl").read_text().splitlines()]
    read = [read_event(event) for event in events]
    assert {event["event"] for event in events} <= {*DRIVER_RECORDS, *REPORTS}
    for event, entry in zip(events, read, strict=True):
        written = as_event(entry)
        assert list(written.items())[: len(event)] == list(event.items())
        assert read_event(json.loads(json.dumps(written))) == entry


def test_a_line_is_strict_json_whatever_a_loss_has_come_to() -> None:
    values = {"step": 3, "loss": float("inf"), "gap": float("-inf"), "phase": "warm-up", "accuracy": 0.5}
    entry = Entry(1.0, WorkerReported(7, 0, 1, Metrics(values)))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = as_line(as_event(entry))
    assert line.endswith("\n")
    written = json.loads(line, parse_constant=refuse)
    assert written["values"]["loss"] == "Infinity"
    assert read_event(written) == entry
    nan = as_line(as_event(Entry(1.0, WorkerReported(7, 0, 1, Metrics({"step": 3, "loss": float("nan")})))))
    assert json.loads(nan, parse_constant=refuse)["values"] == {"step": 3, "loss": "NaN"}
    assert math.isnan(as_event(read_event(json.loads(nan)))["values"]["loss"])  # type: ignore[index]
