"""Makes the scheduler of a fit, and passes it the length of the fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from spark_elastic.estimator.plan import StepPlan


@dataclass(frozen=True)
class Course:
    """The length of a fit, for schedulers that span all of it."""

    epochs: int
    steps_per_epoch: int


def wants_course(steps: StepPlan) -> bool:
    """Whether the scheduler takes ``steps_per_epoch``, and neither its arguments nor a default give the number of steps."""
    if steps.scheduler is None or not {"steps_per_epoch", "total_steps"}.isdisjoint(steps.scheduler_arguments):
        return False
    try:
        taken = inspect.signature(steps.scheduler).parameters.get("steps_per_epoch")
    except (TypeError, ValueError):
        return False
    return taken is not None and taken.default in (None, inspect.Parameter.empty)


def wants_epochs(steps: StepPlan) -> bool:
    """Whether the scheduler is told how many epochs there are, so that their number affects every step."""
    if steps.scheduler is None or not wants_course(steps) or "epochs" in steps.scheduler_arguments:
        return False
    return "epochs" in inspect.signature(steps.scheduler).parameters


def make_scheduler(
    steps: StepPlan, optimizer: torch.optim.Optimizer, course: Callable[[], Course]
) -> LRScheduler | None:
    """Make the learning rate scheduler, with ``epochs`` and ``steps_per_epoch`` if it takes them; None if there is none."""
    if steps.scheduler is None:
        return None
    arguments = dict(steps.scheduler_arguments)
    if wants_course(steps):
        known = course()
        arguments["steps_per_epoch"] = known.steps_per_epoch
        if wants_epochs(steps):
            arguments["epochs"] = known.epochs
    return steps.scheduler(optimizer, **arguments)
