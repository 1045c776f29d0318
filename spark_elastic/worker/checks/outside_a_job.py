"""Refuses, in an elastic function that is called outside a job, what a job would refuse at its first step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spark_elastic.worker.checks.manual_averaging import reductions
from spark_elastic.worker.checks.training_code import module_of, not_wrapped
from spark_elastic.worker.module_registers import living, stepped

if TYPE_CHECKING:
    from spark_elastic.worker.state.torch_state import TorchState


@contextmanager
def checked_outside(state: TorchState) -> Iterator[None]:
    """Raise ``TrainingCodeError`` at an optimizer's first step if it trains a module of the State that is not wrapped."""
    reductions.begin()
    looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer in looked_at:
            return
        looked_at.add(optimizer)
        name = _trains_unwrapped(state, optimizer)
        if name is not None:
            raise not_wrapped(name, module_of(name))

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


def _trains_unwrapped(state: TorchState, optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of a parameter that is trained and belongs to no wrapper; None if there is none."""
    names = state._parameter_names()
    trained = [p for p in stepped(optimizer) if p.grad is not None]
    if not any(id(p) in names for p in trained) or reductions.may_average(trained):
        return None
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel, wrappers

    # Include wrappers of which only the module is in the State, and those that are frozen for the garbage collector.
    found = [*wrappers, *living(DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)]
    wrapped = {id(parameter) for wrapper in found for parameter in wrapper.parameters()}
    return next((names[id(p)] for p in trained if id(p) in names and id(p) not in wrapped), None)
