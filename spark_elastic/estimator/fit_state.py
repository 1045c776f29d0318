"""The state of a fit: what its commits keep."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

import spark_elastic as se
from spark_elastic.estimator.callbacks import Metrics
from spark_elastic.worker.state.snapshot import constant


class FitState(se.TorchState):
    """What a fit has to keep through resets, beside model, optimizer and loader. All ranks hold the same values.

    epoch, step: the next ones, from 0. global_step: the number of steps of all epochs so far. names, sums: the names of what
    is measured, and its sums over the epoch so far, weighted by the rows' weights; the last sum is that of the weights.
    sizes: the sizes of the worlds that have trained in this epoch. history: a line of JSON for each epoch that has ended.
    stopped: the number of epochs that were wanted when a callback ended training, else 0. best: the weights that a callback
    has kept. started: the time when the epoch began. callbacks: the pickled callbacks. callbacks_given: a description of the
    callbacks that the fit began with. begun: the fit whose beginning callbacks have been told of.
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
    started: float
    callbacks: bytes
    callbacks_given: str
    begun: str

    def _compared_values(self) -> dict[str, object]:
        return {name: value for name, value in super()._compared_values().items() if name != "started"}


def history_of(state: FitState) -> list[Metrics]:
    """Return a dict for each epoch that has ended."""
    return [json.loads(line) for line in state.history.splitlines()]


def kept_weights(weights: Mapping[str, object]) -> dict[str, object]:
    """Copy a state dict such that commits copy it once, and not at every step."""
    return {name: constant(value) if isinstance(value, torch.Tensor) else value for name, value in weights.items()}
