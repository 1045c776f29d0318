"""Finds mistakes before Spark jobs start, by one training step on the driver with a few rows, made up or read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from spark_elastic.estimator.layout import Layout, outputs_of
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.plan import StepPlan
from spark_elastic.estimator.schedules import Course, make_scheduler
from spark_elastic.estimator.shapes import shown_shape
from spark_elastic.estimator.training import make_optimizer

# An odd number of rows, which is unlikely to be a layer's number of features.
ROWS = 7


def made_up(shapes: Mapping[str, tuple[int, ...]], whole: set[str]) -> dict[str, torch.Tensor]:
    """Make a batch of zeros. whole: the columns of whole numbers."""
    return {
        name: torch.zeros((ROWS, *shape), dtype=torch.int64 if name in whole else torch.float32)
        for name, shape in shapes.items()
    }


def check_steps(model: torch.nn.Module, steps: StepPlan) -> None:
    """Create optimizer and scheduler as a trial. Raises ValueError if the optimizer's parameters are not the model's."""
    model, steps = copy.deepcopy((model, steps))
    make_scheduler(steps, make_optimizer(steps, model), lambda: Course(epochs=1, steps_per_epoch=2))


def try_model(
    model: torch.nn.Module, layout: Layout, objective: Objective | None, batch: dict[str, torch.Tensor]
) -> tuple[Layout, Objective | None]:
    """Call a copy of the model and its losses on a batch. Return a layout and an objective that fit each other.

    A model that does not take scalars as [rows] gets them as [rows, 1]. Raises ValueError if the model cannot be called, or if
    its outputs do not fit labels and losses.
    """
    outputs, layout = try_layouts(model, layout, batch)
    found = outputs_of(outputs, layout)
    if objective is None:
        return layout, None
    try:
        pairs = objective.pairs(layout, outputs, batch)
        objective.loss(pairs, batch[layout.weight].float() if layout.weight else None)
    except Exception as error:
        raise ValueError(
            f"labels do not fit the loss: {error} (label columns {', '.join(_of(batch, layout.labels))}; "
            f"outputs {', '.join(map(shown_shape, found))})"
        ) from error
    return layout, replace(objective, count=len(pairs))


def try_layouts(model: torch.nn.Module, layout: Layout, batch: dict[str, torch.Tensor]) -> tuple[object, Layout]:
    """Call a copy of the model. Return what it returns, and the layout with which the call succeeded."""
    scalar = tuple(
        replace(entry, expand=entry.name is None and not entry.categorical and batch[entry.columns[0]].dim() == 1)
        for entry in layout.inputs
    )
    failure: Exception | None = None
    for candidate in dict.fromkeys((layout, replace(layout, inputs=scalar))):
        try:
            with torch.no_grad():
                return candidate.call(copy.deepcopy(model), batch), candidate
        except Exception as error:
            failure = failure or error
    raise ValueError(
        f"the model cannot be called with these columns: {failure} (columns {', '.join(_of(batch, layout.features))})"
    ) from failure


def widths_of(outputs: Sequence[torch.Tensor]) -> list[int]:
    """Return how many numbers a row of each output has; 0 for a single number that is not a vector."""
    return [int(output[0].numel()) if output[0].numel() > 1 else 0 for output in outputs]


def _of(batch: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[str]:
    return [f"{name} {shown_shape(batch[name])} {str(batch[name].dtype).removeprefix('torch.')}" for name in names]
