"""Helpers for worlds that change size: learning rates that follow the size, and batches cut to fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils import _pytree as pytree

from spark_elastic._integers import whole_number
from spark_elastic.worker.optimizers.steps import is_of_base_class

if TYPE_CHECKING:
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel

T = TypeVar("T")

_EXPONENTS = {"linear": 1.0, "sqrt": 0.5}
# The names under which optimizers and schedulers keep learning rates; no class has all of them.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "eta_min")
# The key, in the first parameter group, of (factor, steps): the factor still to be applied to the rates, and over how many
# steps. Commits hold an optimizer's groups and newcomers receive them, so a warm-up survives as exactly as the weights do.
_LEFT = "lr_change_left"


def scale_learning_rate(
    optimizer: torch.optim.Optimizer, scheduler: object = None, rule: str = "linear", warmup_steps: int = 0
) -> Callable[[int, int], None]:
    """Return a reset callback that scales the learning rate with the size of the world.

        state.register_reset_callbacks([scale_learning_rate(optimizer, scheduler, warmup_steps=100)])

    Use it with ``batch_size=`` per worker, where the global batch grows with the world; with ``global_batch_size=`` there is
    nothing to scale. The optimizer's initial rate applies to the first generation. ``rule`` multiplies the rate by new / old
    size ("linear") or by the square root of that ("sqrt"), at once or in equal parts over the next ``warmup_steps`` optimizer
    steps. A reset within these steps starts from the rate reached so far. The base rates of ``scheduler`` and of the schedulers
    in it are scaled as well, with the bounds and aims that it has, so that the schedule keeps its shape. Call this once for each
    optimizer. Optimizer and scheduler have to be in the State.
    """
    if rule not in _EXPONENTS:
        raise ValueError(f'rule must be "linear" or "sqrt", not {rule!r}')
    warmup_steps = whole_number("warmup_steps", warmup_steps, 0)
    optimizer.param_groups[0].setdefault(_LEFT, (1.0, 0))

    def on_reset(old_size: int, new_size: int) -> None:
        factor = optimizer.param_groups[0][_LEFT][0] * (new_size / old_size) ** _EXPONENTS[rule]
        if not warmup_steps:
            _multiply(optimizer, scheduler, factor)
        optimizer.param_groups[0][_LEFT] = (factor, warmup_steps) if warmup_steps else (1.0, 0)

    def before_step(*_: object) -> None:
        factor, steps = optimizer.param_groups[0][_LEFT]
        if steps and not is_of_base_class(optimizer):
            part = 1 + (factor - 1) / steps
            _multiply(optimizer, scheduler, part)
            optimizer.param_groups[0][_LEFT] = (factor / part, steps - 1) if steps > 1 else (1.0, 0)

    optimizer.register_step_pre_hook(before_step)
    on_reset.looks_at_size = True  # type: ignore[attr-defined]
    return on_reset


def _multiply(optimizer: torch.optim.Optimizer, scheduler: object, factor: float) -> None:
    for group in optimizer.param_groups:
        group.update({name: group[name] * factor for name in _IN_GROUPS if name in group})
    for part in _with_parts(scheduler):
        for name in _IN_SCHEDULERS:
            if hasattr(part, name):
                rates = getattr(part, name)
                setattr(part, name, [rate * factor for rate in rates] if isinstance(rates, list) else rates * factor)


def _with_parts(scheduler: object) -> Iterator[object]:
    """Yield a scheduler and the schedulers that it consists of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)


def micro_batches(model: DistributedDataParallel, batch: T, rows: int) -> Iterator[tuple[T, float]]:
    """Cut this rank's batch into parts of at most ``rows`` rows, and yield each with its share of the batch's rows.

        for part, share in micro_batches(model, batch, rows=64):
            (share * loss_fn(model(part["x"]), part["y"])).backward()
        optimizer.step()

    With mean losses, the gradient is that of the whole batch, but only one part at a time is in memory. So
    ``global_batch_size=`` need not change when the world shrinks. Gradients accumulate under ``model.no_sync()`` and are
    reduced once, with the last part; ranks may have different numbers of parts. ``batch`` is a tensor, or dicts, lists and
    tuples of tensors ``[rows, …]``, which may be jagged. Run each part's forward and backward within its turn of the loop, and
    do not leave the loop early.
    """
    rows = whole_number("rows", rows, 1)
    leaves, structure = pytree.tree_flatten(batch)
    lengths = {leaf.size(0) if isinstance(leaf, torch.Tensor) and leaf.dim() else None for leaf in leaves}
    if len(lengths) != 1 or not (total := lengths.pop()):
        raise ValueError("a batch consists of tensors that all have the same number of rows, at least one")
    cut = [leaf.chunk(math.ceil(total / rows)) for leaf in leaves]
    last = len(cut[0]) - 1
    for number, part in enumerate(zip(*cut, strict=True)):
        with nullcontext() if number == last else model.no_sync():
            yield pytree.tree_unflatten(part, structure), part[0].size(0) / total
