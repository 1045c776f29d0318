"""Detects that each worker trains a model of its own: without a State, there are no commits at which to compare ranks.

In a fixed world, gradients are averaged by collectives, whoever calls them, and every collective is counted. A rank whose
optimizers keep stepping without a collective since the first step shares nothing with the others. Outside a world, in a
function that calls no elastic function, nothing can be shared at all. Models that are meant to be each worker's own, as in a
search, train like this, too. So this is only a warning, after ``STEPS`` steps or when the function returns.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.job import Job

# Steps without a collective before the warning. Some algorithms average weights every few dozen steps.
STEPS = 100

_FIXED = (
    "an optimizer has stepped {steps} times in a world of {size} ranks, and no collective has been entered in between: nothing "
    "averages the gradients, so each rank trains a model of its own. Write model = se.DistributedDataParallel(model), or wrap it "
    "in torch's DistributedDataParallel; where the ranks' models are meant to be different ones, ignore this"
)
_PLAIN = (
    "an optimizer has stepped {steps} times in a function that calls no elastic function: each of {size} workers runs it alone "
    "and trains a model of its own, also where that is wrapped. Put the loop into a function decorated with @se.elastic and "
    "called with a State, or give run() elastic=False; where the workers' models are meant to be different ones, ignore this"
)


class LoneTraining:
    """While entered, counts optimizer steps, and the collectives since the first of them. Warns once, on one worker."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps = 0
        self._collectives = 0
        self._is_settled = False
        # Where the first step was made.
        self._line = ("", 0)

    def __enter__(self) -> LoneTraining:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hook.remove()
        if kind is None:
            self._settle()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._is_settled:
            return
        if not self._steps:
            self._collectives = self._entered()
            frame = sys._getframe(depth_of_user() - 1)
            self._line = frame.f_code.co_filename, frame.f_lineno
        self._steps += 1
        if self._shares() or self._steps >= STEPS:
            self._settle()

    def _settle(self) -> None:
        world = self._job.world
        size, number = (self._job.max_np, self._job.worker) if world is None else (world.size, world.rank)
        if not self._is_settled and self._steps > 1 and size > 1 and number == 0 and not self._shares():
            text = _PLAIN if world is None else _FIXED
            warnings.warn_explicit(text.format(steps=self._steps, size=size), UserWarning, *self._line)
        self._is_settled = True

    def _shares(self) -> bool:
        """Whether there is a State, whose commits compare the ranks, or a collective since the first step."""
        return self._job.state is not None or self._entered() != self._collectives

    def _entered(self) -> int:
        world = self._job.world
        return 0 if world is None else world.collectives
