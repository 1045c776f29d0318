"""Schedulers of fits: how long they are told a fit is, and when they step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fit_plans import plan

from spark_elastic.estimator.training import Trainer, train


@pytest.mark.parametrize(("passes", "limit", "steps"), [(1, None, 20), (3, None, 8), (1, 6, 12), (1, 60, 20)])
def test_a_scheduler_is_told_how_long_the_fit_is(dataset: str, passes: int, limit: int | None, steps: int) -> None:
    """Two epochs of 10 batches of 10 rows; OneCycleLR ends at its lowest rate, and raises if there are more steps."""
    cycle = torch.optim.lr_scheduler.OneCycleLR
    told = {"scheduler": cycle, "scheduler_arguments": {"max_lr": 1.0}, "scheduler_interval": "step", "passes": passes}
    data = {"batch_size": None, "global_batch_size": 10}
    trainer = Trainer(plan(dataset, data=data, steps=told, steps_per_epoch=limit))
    assert isinstance(trainer.scheduler, cycle)
    assert trainer.scheduler.total_steps == steps
    found = train(plan(dataset, data=data, steps=told, steps_per_epoch=limit))
    assert found is not None
    assert found.history[-1]["learning_rate"] < 0.1 < found.history[0]["learning_rate"]


def test_a_function_that_makes_a_scheduler_is_told_too_unless_it_knows(dataset: str) -> None:
    seen: list[tuple[int, ...]] = []

    def make(optimizer: Any, steps_per_epoch: int, epochs: int) -> Any:
        seen.append((steps_per_epoch, epochs))
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    def knows(optimizer: Any, steps_per_epoch: int = 3) -> Any:
        seen.append((steps_per_epoch,))
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    for scheduler, arguments in ((make, {}), (make, {"epochs": 9}), (knows, {}), (knows, {"steps_per_epoch": 4})):
        steps = {"scheduler": scheduler, "scheduler_arguments": arguments, "scheduler_interval": "step"}
        Trainer(plan(dataset, data={"batch_size": None, "global_batch_size": 10}, steps=steps))
    assert seen == [(10, 2), (10, 9), (3,), (4,)]


def test_schedulers_step_each_epoch_or_each_step(dataset: str) -> None:
    halving = {"scheduler": torch.optim.lr_scheduler.StepLR, "scheduler_arguments": {"step_size": 1, "gamma": 0.5}}
    for interval, rate in (("epoch", 0.05), ("step", 0.1 * 0.5**20)):
        found = train(plan(dataset, steps={**halving, "scheduler_interval": interval}))
        assert found is not None
        assert found.history[-1]["learning_rate"] == pytest.approx(rate)
