"""What a fit prints of its epochs."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.estimator.estimator import TorchEstimator, _printer
from spark_elastic.estimator.planning import plan_recipe
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


@pytest.mark.parametrize(("width", "outputs"), [(2, ["prediction"]), (None, ["a_prediction", "b_prediction"])])
def test_output_columns_are_by_default_one_for_each_output(width: int | None, outputs: list[str]) -> None:
    """One output that answers to two labels got two names, and the fit ended with an error about names that nobody gave."""

    class Two(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x).unbind(1)  # type: ignore[return-value]

    net = Two(2, 2) if width is None else torch.nn.Linear(2, width)
    estimator = TorchEstimator(model=net, loss=torch.nn.MSELoss(), featureCols=["x"], labelCols=["a", "b"])
    recipe = plan_recipe(estimator, estimator._layout_of_names(), None)
    model = estimator._untrained(recipe, {"x": torch.ones(3, 2), "a": torch.ones(3), "b": torch.ones(3)})
    assert model.value("outputCols") == outputs
    model._check({})
