"""Reading event logs a line at a time, as whoever follows a running job does."""

from __future__ import annotations

import json

import pytest

from spark_elastic.protocol.records import DriverPaused, Entry
from spark_elastic.timeline.event_log import read_line

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
