"""What modules register by name (submodules, parameters, buffers), and optimizers by group (parameters)."""

from __future__ import annotations

import gc
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch


def registers(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts in which a module keeps its own submodules, parameters and buffers.

    TorchScript's modules have none that are dicts, and nothing can be registered with them.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return ()
    return module._modules, module._parameters, module._buffers


def living(*kinds: type[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules of exactly these types in this process, except those that are frozen for the garbage collector.

    A copy that is still being made, or that has failed and is held by a traceback, has no registers yet and is not a module.
    """
    return [value for value in gc.get_objects() if type(value) in kinds and "_parameters" in vars(value)]


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same_objects(some: Collection[object], others: Collection[object]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class Registered:
    """The objects in some of these dicts, and a check whether they are still there, quick enough to run in every step."""

    def __init__(self, registers: Iterable[Mapping[str, object]]) -> None:
        self._registers = list(registers)
        self._values = [value for register in self._registers for value in register.values()]

    def is_current(self) -> bool:
        """Whether the registers hold the same objects in the same order, whatever their names."""
        present = itertools.chain.from_iterable(register.values() for register in self._registers)
        return sum(map(len, self._registers)) == len(self._values) and all(map(operator.is_, present, self._values))

    @property
    def names(self) -> list[str]:
        """The names under which objects are registered at present."""
        return list(itertools.chain.from_iterable(self._registers))


def non_persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that state dicts omit, by the names of their places."""
    return {
        f"{place}.{name}" if place else name: buffer
        for place, part in module.named_modules()
        for name in part._non_persistent_buffers_set
        if (buffer := part._buffers.get(name)) is not None
    }


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same values; NaN counts as equal to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
