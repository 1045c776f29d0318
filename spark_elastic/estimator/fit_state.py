"""The state of a fit: what its commits keep."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping

import torch

import spark_elastic as se
from spark_elastic.estimator.callbacks import Metrics
from spark_elastic.worker.state.snapshot import constant


class FitState(se.TorchState):
    """What a fit has to keep through resets besides model, optimizer and loader. All ranks hold the same values.

    epoch, step: the next ones, from 0. global_step: the number of steps of all epochs so far. names, sums: the names of the
    measured numbers, and their sums over the epoch so far, weighted by the rows' weights; the last sum is that of the weights.
    sizes: the sizes of the worlds that have trained in this epoch. history: a line of JSON for each finished epoch. stopped:
    the number of epochs requested when a callback stopped training, else 0. best: the weights that a callback has kept.
    seconds: how long the epoch has been trained, as this rank has it. callbacks: the pickled callbacks. callbacks_given: a
    description of the callbacks that the fit began with. begun: the id of the fit for which ``on_fit_begin`` was called.
    """

    epoch: int
    step: int
    global_step: int
    names: list[str]
    sums: torch.Tensor | None
    sizes: list[int]
    history: bytes
    stopped: int
    best: dict[str, object] | None
    seconds: float
    callbacks: bytes
    callbacks_given: str
    begun: str

    # When this process has counted seconds last.
    _counted_at = math.inf

    def count_seconds(self) -> None:
        """Add the time since the last call in this process: no time counts in which the fit did not run at all."""
        now = time.monotonic()
        self.seconds += max(0.0, now - self._counted_at)
        self._counted_at = now

    def commit(self, durable: bool = False) -> None:
        """Commit with the seconds until now; see ``State.commit``."""
        self.count_seconds()
        super().commit(durable)

    def _compared_values(self) -> dict[str, object]:
        return {name: value for name, value in super()._compared_values().items() if name != "seconds"}


def history_of(state: FitState) -> list[Metrics]:
    """Return a dict for each finished epoch."""
    return [json.loads(line) for line in state.history.splitlines()]


def kept_weights(weights: Mapping[str, object]) -> dict[str, object]:
    """Copy a state dict in such a way that commits copy it once rather than at every step."""
    return {name: constant(value) if isinstance(value, torch.Tensor) else value for name, value in weights.items()}
