"""Finds mistakes before Spark jobs start, by calls of the network on the driver with a few rows, made up or real."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spark_elastic.estimator.frame import Facts
from spark_elastic.estimator.layout import Layout, side_by_side
from spark_elastic.estimator.plan import StepPlan
from spark_elastic.estimator.schedules import Course, make_scheduler
from spark_elastic.estimator.shapes import shown_shape
from spark_elastic.estimator.steps import make_optimizer

# An odd number of rows, which is unlikely to be a layer's number of features.
ROWS = 7


def made_up(shapes: Mapping[str, tuple[int, ...]], whole: set[str]) -> dict[str, torch.Tensor]:
    """Make a batch of zeros. whole: the columns of whole numbers."""
    return {
        name: torch.zeros((ROWS, *shape), dtype=torch.int64 if name in whole else torch.float32)
        for name, shape in shapes.items()
    }


def check_steps(model: torch.nn.Module, steps: StepPlan) -> None:
    """Create the optimizer and the scheduler for trial.

    Raises ValueError if the optimizer's parameters are not the model's, and if one of the two cannot be stepped as in a fit.
    """
    model, steps = copy.deepcopy((model, steps))
    optimizer = make_optimizer(replace(steps, zero_redundancy=False), model)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times in a step, which no fit does: take another optimizer"
        )
    if steps.zero_redundancy:
        optimizer = make_optimizer(steps, model)
    scheduler = make_scheduler(steps, optimizer, lambda: Course(epochs=1, steps_per_epoch=2))
    if isinstance(scheduler, ReduceLROnPlateau) and steps.scheduler_interval == "step":
        raise ValueError("ReduceLROnPlateau follows the loss of an epoch: leave out schedulerInterval='step'")


def with_extremes(batch: Mapping[str, torch.Tensor], names: Iterable[str], facts: Facts) -> dict[str, torch.Tensor]:
    """Return the batch with the least and the largest value of all rows in its first and last row, in columns of numbers."""
    found = dict(batch)
    for name in names:
        known = facts.get(name, {})
        if known and not batch[name].is_nested and batch[name].dim() == 1:
            found[name] = batch[name].clone()
            found[name][0], found[name][-1] = known["min"], known["max"]
    return found


def try_layouts(
    model: torch.nn.Module, layout: Layout, batch: dict[str, torch.Tensor]
) -> tuple[object, Layout, torch.nn.Module]:
    """Call a copy of the model. Return its result, the layout with which the call succeeded, and the copy.

    A model that does not take scalars as [rows] gets them as [rows, 1]. A model that takes fewer arguments than there are
    columns gets these side by side as [rows, numbers]. Raises ValueError if the model cannot be called.
    """
    scalar = tuple(
        replace(entry, expand=entry.name is None and not entry.categorical and batch[entry.columns[0]].dim() == 1)
        for entry in layout.inputs
    )
    are_several = max(len(layout.inputs), len(layout.features)) > 1  # one column may be given twice
    together = replace(layout, inputs=side_by_side(layout.inputs)) if are_several else layout
    candidates = list(dict.fromkeys((layout, replace(layout, inputs=scalar), together)))
    failures: list[tuple[Layout, Exception]] = []
    for candidate in candidates:
        try:
            tried = copy.deepcopy(model)
            return candidate.call(tried, batch), candidate, tried
        except Exception as error:
            failures.append((candidate, error))
    # The most informative failure is that of an attempt with as many arguments as forward takes.
    taken = [each for each in failures if _takes(model, each[0], batch)]
    tried_layout, failure = (taken or failures)[0]
    reason = str(failure) if taken else _refusal(model, failure)
    columns = ", ".join(described(batch, layout.features))
    if tried_layout is together is not layout:
        columns += f", side by side in one argument {shown_shape(together.inputs[0].tensor(batch))}"
    raise ValueError(
        f"the model cannot be called with these columns: {reason} (columns {columns}){_hint(model, candidates, batch)}"
    ) from failure


def _takes(model: torch.nn.Module, layout: Layout, batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``forward`` takes the number and names of the arguments that a layout makes."""
    try:
        args, kwargs = layout.arguments(batch)
        inspect.signature(model.forward).bind(*args, **kwargs)
    except Exception:  # columns that cannot go side by side, or another number of arguments
        return False
    return True


def _refusal(model: torch.nn.Module, failure: Exception) -> str:
    """Say that none of the attempts had as many arguments as ``forward`` takes."""
    try:
        names = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return str(failure)
    return f"{type(model).__name__}.forward({', '.join(names)}) takes another number of arguments"


def _hint(model: torch.nn.Module, candidates: Sequence[Layout], batch: Mapping[str, torch.Tensor]) -> str:
    """Return advice for a network that cannot be called, but could be with numbers or weights of another type."""
    features = [name for name in candidates[0].features if name not in candidates[0].categories]
    whole = [name for name in features if not batch[name].is_floating_point()]
    fractional = {**batch, **{name: batch[name].float() for name in whole}}
    for candidate in candidates if whole else ():
        with contextlib.suppress(Exception):
            candidate.call(copy.deepcopy(model), fractional)
            columns = ", ".join(map(repr, whole))
            # Spark casts neither bytes nor arrays to double.
            is_cast = all(batch[name].dim() == 1 for name in whole)
            how = f"cast {columns} to double" if is_cast else f"call .float() on {columns} in forward"
            return f"; it takes fractional numbers: {how}"
    types = {value.dtype for value in model.parameters() if value.is_floating_point()}
    for dtype in types - {torch.float32}:
        for candidate in candidates:
            with contextlib.suppress(Exception):
                candidate.call(copy.deepcopy(model).float(), batch)
                kind = str(dtype).removeprefix("torch.")
                how = "" if dtype is torch.float64 else ", and give mixedPrecision to compute in a smaller type"
                return f"; its weights are {kind}, and fractional columns arrive as float32: call .float() on it{how}"
    return ""


def widths_of(outputs: Sequence[torch.Tensor]) -> list[int]:
    """Return how many numbers a row of each output has; 0 for a single number that is not a vector.

    Raises ValueError for an output that has no rows.
    """
    for place, output in enumerate(outputs):
        if not output.dim() or not len(output):
            raise ValueError(
                f"output {place} of the network has the shape {list(output.shape)}: it needs a row for each row of the batch"
            )
    return [int(output[0].numel()) if output[0].numel() > 1 else 0 for output in outputs]


def described(batch: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[str]:
    """Describe columns of a batch by name, shape and type."""
    return [f"{name} {shown_shape(batch[name])} {str(batch[name].dtype).removeprefix('torch.')}" for name in names]
