"""Messages: what a schema has to refuse, and what has to agree with another place."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from spark_elastic.protocol import messages as m
from spark_elastic.timeline.schema import EVENTS


def test_workers_report_the_events_that_the_schema_says_they_do_and_no_others() -> None:
    assert set(get_args(m.ReportedKind)) == {kind for kind, (_, _, values) in EVENTS.items() if values is not None}


def test_an_event_of_the_drivers_own_cannot_be_reported_by_a_worker() -> None:
    frame = msgspec.msgpack.encode({"type": "Reported", "kind": "job_failed", "generation": 1, "values": {}})
    with pytest.raises(msgspec.ValidationError, match="job_failed"):
        msgspec.msgpack.decode(frame, type=m.ToDriver)
