"""Skeletons: what is left of a state when its tensors are taken out, in a commit as in a file.

Also what a checkpoint has to know of the commit that it is made from.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Immutable, and readable without running code.
PLAIN = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size)

# In a state dict's ``_metadata``: that this module is our wrapper, whose ``module.`` a plain module's weights lack.
WRAPPER_MARK = "wrapper"


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


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Copy a tree of dicts, lists, tuples and ``StateDict``s, with ``function`` applied to all else in it.

    Dicts whose keys are no plain values count as leaves.
    """
    kind: Any = type(tree)
    if kind is StateDict:
        return StateDict(map_tree(function, tree.content))
    if kind in (dict, OrderedDict) and all(map(is_plain, tree)):
        copied = kind((key, map_tree(function, entry)) for key, entry in tree.items())
        if hasattr(tree, "_metadata"):  # versions of a module's parts
            copied._metadata = map_tree(copy.deepcopy, tree._metadata)
        return copied
    if kind in (list, tuple):
        return kind(map_tree(function, entry) for entry in tree)
    return function(tree)


def is_plain(key: object) -> bool:
    """Whether a key is read back as it was written."""
    return type(key) in PLAIN or (type(key) is tuple and all(map(is_plain, key)))


class KeptTensors(Protocol):
    """The tensors of a commit, with what has to be known of each."""

    @property
    def views(self) -> Sequence[torch.Tensor]:
        """The tensors themselves, in the order of the skeleton's leaves."""
        ...

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """What has to be known of each of them."""
        ...


class Kept(Protocol):
    """A commit as a checkpoint is made from it."""

    @property
    def skeleton(self) -> Any:
        """The tree of all that is no tensor, with a ``Leaf`` in the place of each tensor."""
        ...

    @property
    def buffer(self) -> KeptTensors:
        """The tensors."""
        ...


class Lender(Protocol):
    """Lends the last commit to a reader on another thread."""

    @property
    def current(self) -> Kept:
        """The last commit as far as it is kept; its skeleton tells the step."""
        ...

    def lend(self) -> Kept:
        """Give the last commit away for reading; it stays as it is until ``take_back``, which any thread may call."""
        ...

    def take_back(self) -> None:
        """Forget the reader."""
