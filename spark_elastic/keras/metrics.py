"""Computes a model's metrics over the rows of all ranks, each of which adds its part of a step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np
import torch

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.collectives import allgather_object, allreduce

NOT_BUILT = (
    "a metric makes its variables when it is updated for the first time, so a new worker lacks those that commits have: "
    "update it once, and reset it, before the KerasState is made, or give it to compile()"
)


def variables_of(metrics: Iterable[keras.Metric]) -> list[keras.Variable]:
    """Return the variables in which metrics accumulate, without duplicates."""
    return list({id(variable): variable for metric in metrics for variable in metric.variables}.values())


class Totals:
    """The metrics' totals from before a step, set aside while the metrics accumulate the step's own part.

    Raises ``TrainingCodeError`` for a metric whose variable says that it cannot be added up.
    """

    def __init__(self, metrics: Iterable[keras.Metric]) -> None:
        self._metrics = list(metrics)
        self._totals = [(variable, variable.value.clone()) for variable in variables_of(self._metrics)]
        for variable, _ in self._totals:
            if getattr(variable, "aggregation", "sum") not in ("sum", None):
                raise TrainingCodeError(
                    f"the variable {variable.path} of a metric has aggregation={variable.aggregation!r}, and the values "
                    "of all ranks are added up: leave the metric out of compile()"
                )
        self.begin()

    def begin(self) -> None:
        """Begin a new part from zero."""
        for metric in self._metrics:
            metric.reset_state()
        self._empty = [variable.value.clone() for variable, _ in self._totals]

    def part(self) -> list[torch.Tensor]:
        """Return what the metrics have accumulated since ``begin``."""
        return [variable.value - empty for (variable, _), empty in zip(self._totals, self._empty, strict=True)]

    def add(self, part: Sequence[torch.Tensor]) -> None:
        """Set the metrics to the earlier totals plus this part."""
        for (variable, total), added in zip(self._totals, part, strict=True):
            variable.assign(total + added.to(total.device))


def sum_over_ranks(part: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add up a step's parts over all ranks."""
    return [each for each in reduced(part, "sum") if each is not None]


def sum_over_shards(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Add up the parts of all shards on all ranks, in the order of shards, so that bits are equal at any size."""
    gathered = allgather_object([[tensor.cpu() for tensor in part] for part in parts])
    in_order = [part for parts_of_rank in gathered for part in parts_of_rank]  # ranks hold the shards in rank order
    return [functools.reduce(torch.add, each) for each in zip(*in_order, strict=True)]


def check_metrics(metrics: Iterable[keras.Metric]) -> None:
    """Raise ``TrainingCodeError`` for metrics that are not sums, and warn of those that may not be."""
    for metric in metrics:
        parts = getattr(metric, "metrics", None)  # the metrics given to compile()
        for each in [metric] if parts is None else parts:
            if not each.variables:
                raise TrainingCodeError(
                    f"the metric {each.name} has no variables, and only variables are added up over steps and ranks: make them "
                    "by add_variable, or leave the metric out"
                )
            if isinstance(each, keras.metrics.MeanMetricWrapper) and each._fn_kwargs.get("axis") == 0:
                warnings.warn(
                    f"the metric {each.name} has axis=0, so it is computed of whole batches, and ranks have parts of them: "
                    "it depends on the number of workers",
                    stacklevel=2,
                )
            if not type(each).update_state.__module__.startswith("keras."):
                warnings.warn(
                    f"the variables of the metric {each.name} are added up over steps and ranks, which is right only for sums "
                    "and quotients of sums, and not for a maximum, for example",
                    stacklevel=2,
                )


def check_logs(model: keras.Model, logs: Mapping[str, object]) -> None:
    """Raise ``TrainingCodeError`` for a number in the logs that comes from no metric, and so has no total."""
    metrics = model.get_metrics_result()
    for name, value in logs.items():
        if name not in metrics or not np.array_equal(_array(value), _array(metrics[name]), equal_nan=True):
            raise TrainingCodeError(
                f"train_step returns {name!r}, which is not the result of a metric of that name, so it has no value over all "
                f"steps and ranks: make a keras.metrics.Mean(name={name!r}), update it, and return its result()"
            )


def _array(value: object) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value))


def results_of(model: keras.Model, logs: Mapping[str, object]) -> dict[str, object]:
    """Return the logs of a step with the metrics' current results."""
    metrics = model.get_metrics_result()
    return {name: metrics.get(name, value) for name, value in logs.items()}


def reduced(tensors: Sequence[torch.Tensor | None], op: str, weight: float = 1.0) -> list[torch.Tensor | None]:
    """Reduce over ranks, all tensors of a dtype at once. None is the gradient of a variable that the loss does not use."""
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if tensor is not None):
        parts = {place: tensor for place, tensor in enumerate(tensors) if tensor is not None and tensor.dtype == dtype}
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        values = allreduce(flat if weight == 1 else flat * weight, op).split([each.numel() for each in parts.values()])
        for (place, part), value in zip(parts.items(), values, strict=True):
            results[place] = value.view_as(part)
    return results
