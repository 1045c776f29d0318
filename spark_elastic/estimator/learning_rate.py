"""Finds a learning rate: a short fit in which the rate grows from step to step, and the rate at which the loss falls fastest.

After Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy
import torch
from pyspark.sql import DataFrame

from spark_elastic._integers import whole_number
from spark_elastic._saved_names import saved_as
from spark_elastic.estimator.callbacks import BatchContext, Callback, EpochContext
from spark_elastic.estimator.converters import number

if TYPE_CHECKING:
    from spark_elastic.estimator.estimator import ElasticEstimator

# The entry of the history that returns the losses of the steps to the driver.
_LOSSES = "losses_of_steps"
# The fraction of the steps to which a line is fitted, and how many times its standard error a fall of that line has to have.
_WINDOW = 0.25
_CERTAIN = 3.0


@dataclass(frozen=True)
class LearningRates:
    """The loss of each step of a fit in which the learning rate grew.

    Args:
        rates: the learning rate of each step, growing by a constant factor.
        losses: the loss of each step, a mean over the rows of all workers.
    """

    rates: list[float]
    losses: list[float]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss fell fastest before its minimum; None if it never fell by more than its noise.

        Lines are fitted by least squares to a quarter of the steps at a time. The loss is lowest where their mean is, falls
        fastest where they are steepest, and a fall counts if it is three times its standard error.
        """
        losses = numpy.array([*takewhile(math.isfinite, self.losses)])
        length = max(2, round(_WINDOW * len(self.losses)))
        if len(losses) < length:
            return None
        windows = numpy.lib.stride_tricks.sliding_window_view(losses, length)
        offsets = numpy.arange(length) - (length - 1) / 2
        means, slopes = windows.mean(1), windows @ offsets / (offsets @ offsets)
        steepest = int(slopes[: means.argmin() + 1].argmin())
        residuals = windows[steepest] - means[steepest] - slopes[steepest] * offsets
        error = math.sqrt(residuals @ residuals / max(length - 2, 1) / (offsets @ offsets))
        if slopes[steepest] >= 0 or -slopes[steepest] < _CERTAIN * error:
            return None
        return self.rates[steepest + (length - 1) // 2]


LearningRates.__init__.__doc__ = "Keep the two lists; nothing is checked. ``find_learning_rate`` makes this object."


def find_learning_rate(
    estimator: ElasticEstimator, dataset: DataFrame, low: float, high: float, steps: int
) -> LearningRates:
    """Run the short fit; see ``ElasticEstimator.find_learning_rate``."""
    try:
        low, high = number(0, low_open=True)(low), number(0, low_open=True)(high)
    except (TypeError, ValueError) as error:
        raise type(error)(f"low and high: {error}") from None
    if low >= high:
        raise ValueError(f"low must be smaller than high, not {low!r} and {high!r}")
    steps = whole_number("steps", steps, 2)
    if isinstance(estimator.value("optimizer"), torch.optim.Optimizer):
        raise ValueError("an optimizer instance has a learning rate of its own; give the optimizer's class")
    trial = estimator.copy()
    for name in ("callbacks", "checkpointSteps", "eventLogDir", "loggers", "runId"):
        trial.clear(trial.getParam(name))
    growth = Growth(high / low, steps)
    model = trial.setParams(
        learningRate=low,
        scheduler=torch.optim.lr_scheduler.LambdaLR,
        schedulerParams={"lr_lambda": growth},
        schedulerInterval="step",
        stepsPerEpoch=steps,
        epochs=steps,  # an upper bound: ``Sweep`` ends training after this many steps
        callbacks=[Sweep(steps)],
        terminateOnNaN=False,
        verbose=0,
    ).fit(dataset)
    if (store := trial.value("store")) is not None and model.run_id is not None:
        with suppress(KeyError):  # a store with keep=False has deleted it
            store.delete(model.run_id)
    found = {int(step): float(loss) for step, loss in model.history[-1][_LOSSES] if step < steps}
    return LearningRates([low * growth(step) for step in found], list(found.values()))


@dataclass(frozen=True)
class Growth:
    """The factor of the learning rate in each step: it grows from 1 to ``factor`` in ``steps`` steps, and no further."""

    factor: float
    steps: int

    def __call__(self, step: int) -> float:
        """Return the factor in a step, from 0."""
        return float(self.factor ** min(step / (self.steps - 1), 1.0))


@saved_as("spark_elastic.estimator")
class Sweep(Callback):
    """Records the loss of each step, and ends training after the epoch in which enough steps are reached."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.losses: dict[int, float] = {}

    def on_batch_end(self, ctx: BatchContext) -> None:
        """Record the loss. Steps that are repeated after a loss of workers are recorded once.

        The step number comes from committed state, like the learning rate: a loss of workers may undo an epoch's records.
        """
        self.losses[ctx.global_step] = ctx.loss

    def on_epoch_end(self, ctx: EpochContext) -> None:
        """Put the losses into the history, and end training if there are enough of them."""
        ctx.metrics[_LOSSES] = list(self.losses.items())
        if max(self.losses, default=-1) + 1 >= self.steps:
            ctx.stop()
