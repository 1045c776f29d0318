"""How losses become steps: passes, and what an optimizer trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fit_plans import ROWS, plan
from torch import nn

from spark_elastic.errors import TrainingCodeError
from spark_elastic.estimator.callbacks import Callback
from spark_elastic.estimator.training import train


def test_accumulated_passes_make_the_steps_of_a_larger_batch(dataset: str) -> None:
    small = train(plan(dataset, steps={"passes": 2}))
    large = train(plan(dataset, data={"batch_size": 20}))
    assert small is not None
    assert large is not None
    # The same rows in the same order: two passes of ten are a batch of twenty.
    assert small.weights["weight"].item() == pytest.approx(large.weights["weight"].item(), rel=1e-4)


@pytest.mark.parametrize("weight", [None, "w"])
def test_accumulated_passes_of_different_weights_make_the_step_of_one_batch(dataset: str, weight: str | None) -> None:
    """Of 100 rows, 48 in a batch: the last of three passes has 4 rows, and weights differ, too."""
    data = {"validation_url": None}
    small = train(plan(dataset, weight=weight, data={**data, "batch_size": 48}, steps={"passes": 3}))
    large = train(plan(dataset, weight=weight, data={**data, "batch_size": ROWS}))
    assert small is not None
    assert large is not None
    assert small.weights["weight"].item() == pytest.approx(large.weights["weight"].item(), rel=1e-5)
    assert small.history[1]["loss"] == pytest.approx(large.history[1]["loss"], rel=1e-5)


def test_parameters_that_come_to_require_gradients_need_an_optimizer_that_has_them(dataset: str) -> None:
    class Thaw(Callback):
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def on_epoch_end(self, ctx: Any) -> None:
            ctx.model.requires_grad_(True)

    def network() -> nn.Linear:
        model = nn.Linear(1, 1)
        model.bias.requires_grad_(False)
        return model

    with pytest.raises(
        TrainingCodeError, match=r"bias came to require gradients during the fit.*fit again with the fitted"
    ):
        train(plan(dataset, model=network(), callbacks=[Thaw(nn.Linear(1, 1))]))
    model = network()
    steps = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert train(plan(dataset, model=model, callbacks=[Thaw(model)], steps=steps)) is not None
