"""What a fit prints of its epochs."""

from __future__ import annotations

import pytest

from spark_elastic.estimator.estimator import _printer
from spark_elastic.protocol.event_format import as_event
from spark_elastic.protocol.records import Entry, JobFailed, WorldSized


def test_a_fit_prints_its_epochs_and_a_loss_that_is_reported_within_one(capsys: pytest.CaptureFixture[str]) -> None:
    show = _printer("fit-1")
    show({"event": "metrics", "values": {"epoch": 0, "loss": 0.25, "rows": 1200}})
    show({"event": "metrics", "values": {"epoch": 1, "loss": float("nan")}})
    show(as_event(Entry(0.0, JobFailed("ValueError", "no more"))))
    show(as_event(Entry(0.0, WorldSized(1, False, [2, 1], [1900.0, 2600.0]))))
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, second) == ("fit-1 epoch 0: loss 0.25, 1,200 rows", "fit-1 epoch 1: loss nan")
    assert third.startswith(
        "fit-1: 1 of 2 workers train from here on, because more are not faster: 2 trained 1,900 rows/s"
    )
