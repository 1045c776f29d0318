"""Snapshots of a state: tensors in flat kept buffers, everything else by value.

A commit copies into one of two kept buffers and switches over when the copy is whole, so the last intact copy is never
touched. The copy is ``torch._foreach_copy_`` into views of one flat tensor per dtype and device: no allocation from the
second commit on, and a flat tensor is what travels to a newcomer in one piece.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_IMMUTABLE = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What has to be known of a tensor to keep room for it."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateDict:
    """Marks what came out of an object's ``state_dict`` and goes back through its ``load_state_dict``."""

    content: Any


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands in a skeleton for the tensor of this number."""

    index: int


def flatten(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy a tree of dicts, lists and tuples; its tensors go into ``tensors`` uncopied, with a ``Leaf`` in their place.

    Other mutable objects are deep-copied. Raises ``TypeError`` for what cannot be copied.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return Leaf(len(tensors) - 1)
    if kind is StateDict:
        return StateDict(flatten(value.content, tensors))
    if kind is dict:
        return {key: flatten(entry, tensors) for key, entry in value.items()}
    if kind is list:
        return [flatten(entry, tensors) for entry in value]
    if kind is tuple:
        return tuple(flatten(entry, tensors) for entry in value)
    if isinstance(value, Mapping) and hasattr(value, "items") and kind.__name__ == "OrderedDict":
        copied = kind((key, flatten(entry, tensors)) for key, entry in value.items())
        if hasattr(value, "_metadata"):  # versions of a module's parts
            copied._metadata = copy.deepcopy(value._metadata)
        return copied
    return copy.deepcopy(value)


def unflatten(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Build the tree again, each ``Leaf`` replaced by a clone of its tensor; nothing in it is shared with the snapshot."""
    kind = type(skeleton)
    if kind is Leaf:
        return tensors[skeleton.index].clone()
    if kind in _IMMUTABLE:
        return skeleton
    if kind is StateDict:
        return StateDict(unflatten(skeleton.content, tensors))
    if kind is dict or kind.__name__ == "OrderedDict":
        copied = kind((key, unflatten(entry, tensors)) for key, entry in skeleton.items())
        if hasattr(skeleton, "_metadata"):
            copied._metadata = copy.deepcopy(skeleton._metadata)
        return copied
    if kind is list:
        return [unflatten(entry, tensors) for entry in skeleton]
    if kind is tuple:
        return tuple(unflatten(entry, tensors) for entry in skeleton)
    return copy.deepcopy(skeleton)


@dataclass(slots=True)
class TensorBuffer:
    """Kept room for a list of tensors: one flat tensor per (dtype, device), and a view of it per tensor."""

    specs: tuple[TensorSpec, ...] = ()
    flats: list[torch.Tensor] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)

    def fit(self, specs: tuple[TensorSpec, ...]) -> None:
        """Make room for tensors of these specs; keeps what is there when they are the same."""
        if specs == self.specs and self.flats:
            return
        sizes: dict[tuple[torch.dtype, str], int] = {}
        places = []
        for spec in specs:
            key = (spec.dtype, spec.device)
            places.append(sizes.get(key, 0))
            sizes[key] = places[-1] + math.prod(spec.shape)
        self.flats = []  # the old room goes before the new comes
        self.views = []
        flats = {
            (dtype, device): torch.empty(count, dtype=dtype, device=device) for (dtype, device), count in sizes.items()
        }
        self.flats = list(flats.values())
        self.views = [
            flats[spec.dtype, spec.device][start : start + math.prod(spec.shape)].view(spec.shape)
            for spec, start in zip(specs, places, strict=True)
        ]
        self.specs = specs

    def copy_from(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors in. On CUDA, wait until the copies are complete: a copy that may still fail is no commit."""
        specs = tuple(TensorSpec(tensor.dtype, str(tensor.device), tuple(tensor.shape)) for tensor in tensors)
        self.fit(specs)
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self.views, tensors)
        if any(flat.is_cuda for flat in self.flats):
            torch.cuda.current_stream().synchronize()


@dataclass(slots=True)
class Snapshot:
    """One copy of a state: the skeleton of what is shared by all ranks, its tensors, and what is this rank's own."""

    buffer: TensorBuffer = field(default_factory=TensorBuffer)
    skeleton: Any = None
    own: Any = None

    def take(self, shared: Any, own: Any) -> None:
        """Copy a state in. An exception leaves this snapshot unusable, and the other one of its pair as it was."""
        tensors: list[torch.Tensor] = []
        skeleton = flatten(shared, tensors)
        self.buffer.copy_from(tensors)
        self.skeleton = skeleton
        self.own = own

    def content(self) -> Any:
        """Return a copy of the shared part as it was taken."""
        return unflatten(self.skeleton, self.buffer.views)


class SnapshotPair:
    """Two snapshots, of which one is current; ``spare`` is written, then ``switch`` makes it current at once."""

    def __init__(self) -> None:
        self._snapshots = (Snapshot(), Snapshot())
        self._current = 0
        self.is_empty = True

    @property
    def current(self) -> Snapshot:
        assert not self.is_empty, "nothing has been saved yet"
        return self._snapshots[self._current]

    @property
    def spare(self) -> Snapshot:
        return self._snapshots[1 - self._current]

    def switch(self) -> None:
        self._current = 1 - self._current
        self.is_empty = False
