"""What a fit prints of its epochs."""

from __future__ import annotations

import pytest

from spark_elastic.estimator.estimator import _printer


def test_a_fit_prints_its_epochs_and_a_loss_that_is_reported_within_one(capsys: pytest.CaptureFixture[str]) -> None:
    show = _printer("fit-1")
    show({"event": "world_formed"})
    show({"event": "metrics", "values": {"epoch": 0, "loss": 0.25, "rows": 1200}})
    show({"event": "metrics", "values": {"epoch": 1, "loss": float("nan")}})
    assert capsys.readouterr().out == "fit-1 epoch 0: loss 0.25, 1,200 rows\nfit-1 epoch 1: loss nan\n"
