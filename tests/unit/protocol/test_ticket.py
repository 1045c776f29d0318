"""What a worker is told of its job comes over whole, and shows no secret when printed."""

from __future__ import annotations

import msgspec

from spark_elastic.protocol.fault_points import Action, Fault, Point
from spark_elastic.protocol.ticket import CheckpointPlan, Payload

PLAN = CheckpointPlan("s3://AK:S3CRET@bucket/x?secret_key=S3CRET", 3, 2.5, 4, b"S3CRET", ("loss", "min"))


def test_a_payload_travels_as_it_is() -> None:
    faults = (Fault(0, Action.KILL, Point.COMMIT, rank=1, step=5),)
    payload = Payload(b"\x80call", 7.5, 3, faults, PLAN, elastic=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=Payload) == payload


def test_neither_the_url_nor_the_options_of_a_checkpoint_show_their_secrets() -> None:
    for shown in (repr(PLAN), str(PLAN), repr(Payload(b"", 1.0, 1, checkpoint=PLAN))):
        assert "S3CRET" not in shown
        assert "bucket" in shown
        assert "attempt=3" in shown
