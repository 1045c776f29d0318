"""The tensors of models that a shard's forward and backward change: gradients of parameters, and buffers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType

import torch
from torch import nn

from spark_elastic.data.randomness import GENERATORS, is_seeded, own_generators
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.fingerprint import sums_of_bits
from spark_elastic.worker.module_registers import Registered, registers

# How deep the attributes of modules are searched for generators, and at how many entries of each container and object.
_DEPTH, _ENTRIES = 2, 100
# Where a module keeps what is searched with the modules, and what is no generator.
_REGISTERS = frozenset({"_modules", "_parameters", "_buffers"})


class Buffer:
    """A tensor that a forward changes, and its value before a loop."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.before = tensor.detach().clone()

    @property
    def present(self) -> torch.Tensor:
        """The tensor that currently holds the value."""
        return self.tensor

    @property
    def has_changed(self) -> bool:
        """Whether the value has changed. Compares values, because torch's batch norms do not increase a tensor's version."""
        return not torch.equal(self.present, self.before)

    def note(self) -> None:
        """Note the value before a loop."""
        self.before.copy_(self.tensor)

    def set(self, value: torch.Tensor | None = None) -> None:
        """Set the tensor to a value, or reset it."""
        self.tensor.copy_(self.before if value is None else value)


class ModuleBuffer(Buffer):
    """A buffer where it is registered. A module may change it, or put another tensor in its place."""

    def __init__(self, owner: nn.Module, key: str, name: str, tensor: torch.Tensor) -> None:
        super().__init__(name, tensor)
        self._owner = owner
        self._key = key

    @property
    def present(self) -> torch.Tensor:
        """The tensor that is registered at present."""
        value = self._owner._buffers[self._key]
        if value is None or value.shape != self.tensor.shape or value.dtype != self.tensor.dtype:
            raise TrainingCodeError(
                f"the buffer {self.name} changes its shape or dtype while a shard is computed, which shards= cannot keep equal "
                "in worlds of all sizes"
            )
        return value

    def set(self, value: torch.Tensor | None = None) -> None:
        """Set the tensor that was registered before the loop to a value, or reset it."""
        self._owner._buffers[self._key] = self.tensor
        super().set(value)


class Sources:
    """Parameters with their names, each once, and buffers, each as often as it is registered."""

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[Buffer]) -> None:
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for name, parameter in parameters:
            named.setdefault(id(parameter), (name, parameter))
        self.names = [name for name, _ in named.values()]
        self.parameters = [parameter for _, parameter in named.values()]
        each = list(buffers)
        # The buffers that are averaged, those that count something, such as BatchNorm's batches, and those that must not
        # change.
        self.averaged = [b for b in each if b.tensor.is_floating_point()]
        self.counters = [b for b in each if _counts(b.tensor)]
        self.constant = [b for b in each if not b.tensor.is_floating_point() and not _counts(b.tensor)]

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers."""
        return [*self.averaged, *self.counters, *self.constant]

    def sums_before(self) -> list[int]:
        """Return a number for each buffer that may change, which tells whether its values before the loop are the same."""
        return sums_of_bits([buffer.before for buffer in (*self.averaged, *self.counters)])

    def appeared(self) -> str:
        """Name a parameter or buffer that a forward has registered since; empty if there is none."""
        return ""

    @property
    def structure(self) -> list[object]:
        """The structure by which the places of parameters and buffers are numbered."""
        return [
            *((p.shape, p.dtype, p.device) for p in self.parameters),
            *((b.name, b.tensor.shape, b.tensor.device) for b in self.buffers),
        ]


def _counts(tensor: torch.Tensor) -> bool:
    return not (tensor.dim() or tensor.is_floating_point() or tensor.is_complex())


class ModuleSources(Sources):
    """The parameters and buffers of some modules."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = {id(part): (part, name) for model in models for name, part in model.named_modules()}
        self._registered = Registered(register for module, _ in modules.values() for register in registers(module))
        buffers: list[Buffer] = []
        self._tensors: list[tuple[str, Mapping[str, object], frozenset[str]]] = []
        for module, prefix in modules.values():
            _refuse_own_generators(module, prefix)
            for register in (module._parameters, module._buffers):
                there = frozenset(key for key, tensor in register.items() if tensor is not None)
                self._tensors.append((prefix, register, there))
            buffers += [
                ModuleBuffer(module, key, _place(prefix, key), tensor)
                for key, tensor in module._buffers.items()
                if tensor is not None
            ]
        parameters = ((_place("", name), tensor) for model in models for name, tensor in model.named_parameters())
        super().__init__(parameters, buffers)

    def appeared(self) -> str:
        """Name a parameter or buffer that a forward has registered since; empty if there is none."""
        for prefix, register, there in self._tensors:
            for key, tensor in register.items():
                if tensor is not None and key not in there:
                    return _place(prefix, key)
        return ""

    def is_current(self) -> bool:
        """Whether the models still consist of these parameters and buffers."""
        return self._registered.is_current()


def _place(module: str, key: str) -> str:
    """Return the name by which the user knows a part of a wrapped model."""
    return f"{module}.{key}".lstrip(".").removeprefix("module.")


def _refuse_own_generators(module: nn.Module, name: str) -> None:
    """Refuse random generators that no shard seeds, and that continue from part to part on each rank."""
    held = [
        (key, each) for key, value in vars(module).items() if key not in _REGISTERS for each in _generators_in(value)
    ]
    forward = inspect.getattr_static(type(module), "forward", None)  # compiled modules have none that can be called
    if isinstance(forward, FunctionType) and not (forward.__module__ or "").startswith("torch."):
        held += [("forward", each) for each in own_generators(forward)]
    for key, generator in held:
        raise TrainingCodeError(
            f"{_place(name, key)} has a {type(generator).__name__} of the model's own. It goes on from shard to shard, so that "
            "what it gives depends on the world: draw from the generators of torch, numpy or random themselves, which are "
            "seeded for each shard, or train without shards="
        )


def _generators_in(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """Yield the generators in an attribute: itself, or in containers and objects that it consists of, but not in modules."""
    kind = type(value)  # proxies may raise whatever is asked of them
    if issubclass(kind, GENERATORS):
        if not is_seeded(value):
            yield value
    elif depth and not issubclass(kind, (nn.Module, torch.Tensor, type, ModuleType)):
        for each in _entries_of(value)[:_ENTRIES]:
            yield from _generators_in(each, depth - 1)


def _entries_of(value: object) -> list[object]:
    try:
        if isinstance(value, (list, tuple)):
            return list(value)
        return list(value.values() if isinstance(value, dict) else vars(value).values())
    except Exception:  # it has no attributes, or is a proxy of what is gone
        return []
