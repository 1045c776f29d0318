"""The metrics of a model over the rows of all ranks, each of which adds its part of a step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import torch

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.collectives import allgather_object, allreduce


def variables_of(metrics: Iterable[keras.Metric]) -> list[keras.Variable]:
    """Return the variables in which metrics add up, each once."""
    return list({id(variable): variable for metric in metrics for variable in metric.variables}.values())


class Totals:
    """What metrics have added up before a step, set aside while they add up the step's own part.

    Raises ``TrainingCodeError`` for a metric that cannot be had by adding up, as its variable says.
    """

    def __init__(self, metrics: Iterable[keras.Metric]) -> None:
        self._metrics = list(metrics)
        self._totals = [(variable, variable.value.clone()) for variable in variables_of(self._metrics)]
        for variable, _ in self._totals:
            if getattr(variable, "aggregation", "sum") not in ("sum", None):
                raise TrainingCodeError(
                    f"the variable {variable.path} of a metric has aggregation={variable.aggregation!r}, and those of ranks "
                    "are added up: leave the metric out of compile()"
                )
        self.begin()

    def begin(self) -> None:
        """Begin a new part."""
        for metric in self._metrics:
            metric.reset_state()
        self._empty = [variable.value.clone() for variable, _ in self._totals]

    def part(self) -> list[torch.Tensor]:
        """Return what has been added up since ``begin``."""
        return [variable.value - empty for (variable, _), empty in zip(self._totals, self._empty, strict=True)]

    def add(self, part: Sequence[torch.Tensor]) -> None:
        """Set the metrics to what they were, and this part."""
        for (variable, total), added in zip(self._totals, part, strict=True):
            variable.assign(total + added.to(total.device))


def sum_over_ranks(part: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add up the parts of a step that all ranks have."""
    return [each for each in reduced(part, "sum") if each is not None]


def sum_over_shards(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Add up the parts of all shards, of which this rank has some, in the order of shards: with equal bits at any size."""
    gathered = allgather_object([[tensor.cpu() for tensor in part] for part in parts])
    in_order = [part for parts_of_rank in gathered for part in parts_of_rank]  # ranks have shards in their order
    return [functools.reduce(torch.add, each) for each in zip(*in_order, strict=True)]


def results_of(model: keras.Model, logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logs of a step with the metrics as they are now."""
    metrics = model.get_metrics_result()
    return {name: metrics.get(name, value) for name, value in logs.items()}


def reduced(tensors: Sequence[torch.Tensor | None], op: str, weight: float = 1.0) -> list[torch.Tensor | None]:
    """Reduce over ranks, all tensors of a dtype at once. None stands for the gradient of a variable that the loss ignores."""
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if tensor is not None):
        parts = {place: tensor for place, tensor in enumerate(tensors) if tensor is not None and tensor.dtype == dtype}
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        values = allreduce(flat if weight == 1 else flat * weight, op).split([each.numel() for each in parts.values()])
        for (place, part), value in zip(parts.items(), values, strict=True):
            results[place] = value.view_as(part)
    return results
