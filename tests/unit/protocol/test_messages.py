"""Messages: what a schema has to refuse, and what has to agree with another place."""

from __future__ import annotations

import msgspec
import pytest

from spark_elastic.protocol import messages as m


def test_an_event_of_the_drivers_own_cannot_be_reported_by_a_worker() -> None:
    frame = msgspec.msgpack.encode({"type": "Reported", "generation": 1, "report": {"event": "job_failed"}})
    with pytest.raises(msgspec.ValidationError, match="job_failed"):
        msgspec.msgpack.decode(frame, type=m.ToDriver)
