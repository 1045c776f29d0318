"""Skeletons: what is left of a state once its tensors are taken out, in a commit as well as in a file.

The Protocols at the end say what a checkpoint has to know about the commit from which it is written.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import cloudpickle
import torch

from spark_elastic._pickling import dumps_for_peers

# Dicts, lists, tuples and ``StateDict``s of whatever users keep: a tree has a shape that no type can express.
Tree: TypeAlias = Any

# Immutable, and readable without running code.
PLAIN = frozenset((int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size))

# Marks our wrapper module in a state dict's ``_metadata``: the plain module's weights have names without its ``module.``.
WRAPPER_MARK = "wrapper"
# The name of the module in torch.compile's wrapper.
COMPILED = "_orig_mod"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What has to be known about a tensor to allocate room for it."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateDict:
    """Marks content that an object's ``state_dict`` returned and its ``load_state_dict`` takes back."""

    content: Any  # whatever the object returned, usually a dict


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands in a skeleton for the tensor with this number. ``is_learned``: it is one by itself that requires gradients."""

    index: int
    is_learned: bool = False


@dataclass(frozen=True, slots=True)
class PartOfDict:
    """Stands in a skeleton for a dict of which each rank has some entries, such as a divided optimizer's state."""

    entries: Mapping[int, object]


def map_tree(function: Callable[[object], object], tree: Tree) -> Tree:
    """Copy a tree of dicts, lists, tuples and ``StateDict``s, with ``function`` applied to everything else in it.

    A dict with keys that are not plain values counts as a leaf. The copy has the shape of the tree.
    """
    kind: Any = type(tree)
    if kind is StateDict:
        return StateDict(map_tree(function, tree.content))
    if kind in (dict, OrderedDict) and has_plain_keys(tree):
        # Plain values are not trees. States have many of them, and each would cost another call in every commit.
        copied = kind(
            [
                (key, function(entry) if type(entry) in PLAIN else map_tree(function, entry))
                for key, entry in tree.items()
            ]
        )
        if hasattr(tree, "_metadata"):  # versions of a module's parts
            copied._metadata = map_tree(copy.deepcopy, tree._metadata)
        return copied
    if kind in (list, tuple):
        return kind(map_tree(function, entry) for entry in tree)
    return function(tree)


def has_plain_keys(tree: Mapping[object, object]) -> bool:
    """Whether a dict counts as a tree."""
    return PLAIN.issuperset(map(type, tree)) or all(map(is_plain, tree))


def is_plain(key: object) -> bool:
    """Whether a key can be read back exactly as it was written."""
    return type(key) in PLAIN or (type(key) is tuple and all(map(is_plain, key)))


def pickled(content: object, skeleton: object, purpose: str) -> bytes:
    """Pickle ``content``, which is made from a skeleton. Raises ``TypeError`` naming an object that cannot be pickled.

    purpose: what can then not be done with that object, such as "sent to a new worker".
    """
    try:
        return dumps_for_peers(content)
    except Exception:
        objects = skeleton.get("objects") if isinstance(skeleton, Mapping) else None
        for name, value in (objects or {}).items():
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"state.{name} cannot be pickled, so it cannot be {purpose} ({error}): keep it outside the State, or name "
                    "it in local= if each worker may have one of its own"
                ) from error
        raise


class KeptTensors(Protocol):
    """The tensors of a commit, with the specs for allocating room for them."""

    @property
    def views(self) -> Sequence[torch.Tensor]:
        """The tensors themselves, in the order of the skeleton's leaves."""
        ...

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """The spec of each tensor."""
        ...


class Kept(Protocol):
    """A commit, as a checkpoint sees it."""

    @property
    def skeleton(self) -> Tree:
        """The tree of the state, with a ``Leaf`` in place of each tensor."""
        ...

    @property
    def buffer(self) -> KeptTensors:
        """The tensors."""
        ...


class Lender(Protocol):
    """Lends the last commit to a reader on another thread."""

    @property
    def current(self) -> Kept:
        """The last commit, as far as it is kept. Its skeleton holds the step."""
        ...

    def lend(self) -> Kept:
        """Lend the last commit for reading. The commit does not change until ``take_back``, which any thread may call."""
        ...

    def take_back(self) -> None:
        """End the loan."""
