"""Keeps in commits what an object of another library, such as a callback, remembers in its attributes."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import pickle
import types
import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch

from spark_elastic.worker.state.inference import writing_to

T = TypeVar("T")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor)
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
# The types that a commit keeps by name, if a module has the object, and the types that may own such a function.
_NAMED_KINDS = (types.FunctionType, types.BuiltinFunctionType, type, np.ufunc)
_OWNERS = (type(None), types.ModuleType, type)
# The packages whose callbacks recreate, after a loss, objects that they made during training, such as file writers.
_LIBRARIES = ("keras", "transformers")
# Marks for arrays, which a commit keeps as tensors, and for functions and classes of modules, which it keeps by name.
_ARRAY = "spark_elastic.array"
_NAMED = "spark_elastic.named"


class Attributes:
    """The attributes of an object that training changes, if they are numbers, strings, arrays, or containers of these.

    Functions and classes that a module holds under their own names count, too.

    For an object with ``state_dict`` and ``load_state_dict``, these methods decide. Attributes that training does not change
    are not kept, because they may differ between ranks.

    The order in each world: ``reset``, whatever the object does when training begins, ``begin``, ``load``.
    """

    def __init__(self, owner: Any, without: Collection[str] = ()) -> None:
        """Note the attributes before training, except those named in ``without``."""
        self._owner = owner
        self._without = without
        self._has_state_dict = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
        self._before = self._dumps()
        self._first_state = copy.deepcopy(owner.state_dict()) if self._has_state_dict else None
        self._has_begun = False
        self._sizes: dict[str, int] = {}
        self._begun: dict[str, bytes] = {}
        self._changed: set[str] = set()

    def reset(self) -> None:
        """Reset attributes that training has changed to their values before training."""
        if self._has_state_dict and self._has_begun:
            self._owner.load_state_dict(copy.deepcopy(self._first_state))
        now = self._dumps()
        for name, value in self._before.items():
            if now.get(name) != value:
                self._set(name, cloudpickle.loads(value))

    def begin(self) -> None:
        """Note the attributes as training begins."""
        self._has_begun = True
        self._sizes = self._sizes_of_others()
        self._begun, self._changed = self._dumps(), set()

    def values(self) -> Any:
        """Return the attributes to keep, with their present values."""
        if self._has_state_dict:
            return self._owner.state_dict()
        for name, size in self._sizes_of_others().items():
            if self._sizes.get(name, size) != size:
                warnings.warn(
                    f"{type(self._owner).__name__}.{name} has changed and holds more than numbers, strings, arrays and "
                    "containers of these, so that no commit keeps it: give the class state_dict and load_state_dict",
                    stacklevel=2,
                )
                del self._sizes[name]
        now = self._plain()
        is_users = type(self._owner).__module__.partition(".")[0] not in _LIBRARIES
        for name in self._begun.keys() & vars(self._owner).keys() - now.keys() if is_users else ():
            kind = type(vars(self._owner)[name]).__name__
            warnings.warn(
                f"{type(self._owner).__name__}.{name} has become a {kind}, which no commit keeps, so after a loss it is again "
                "what it was before training: give the class state_dict and load_state_dict, or make it in on_train_begin",
                stacklevel=2,
            )
            del self._begun[name]
        unchanged = {name: value for name, value in now.items() if name not in self._changed}
        self._changed |= {
            name for name, value in unchanged.items() if self._begun.get(name) != cloudpickle.dumps(value)
        }
        return {name: _kept(value) for name, value in now.items() if name in self._changed}

    def load(self, values: Any) -> None:
        """Set the attributes to values that this or another object had at a commit; None if there are none yet."""
        if values is None:
            return
        if self._has_state_dict:
            self._owner.load_state_dict(values)
            return
        self._changed = set(values)
        for name, value in values.items():
            self._set(name, _given(value))

    def _set(self, name: str, value: object) -> None:
        """Set an attribute, in place if other code may hold the same container."""
        now = vars(self._owner).get(name)
        if type(now) is type(value) is list:
            now[:] = value
        elif type(now) is type(value) is dict:
            now.clear()
            now.update(value)
        elif type(now) is type(value) is np.ndarray and (now.shape, now.dtype) == (value.shape, value.dtype):
            now[...] = value
        elif isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.shape == value.shape:
            with writing_to([now]):
                now.copy_(value)
        else:
            vars(self._owner)[name] = value

    def _dumps(self) -> dict[str, bytes]:
        return {} if self._has_state_dict else {name: cloudpickle.dumps(value) for name, value in self._plain().items()}

    def _sizes_of_others(self) -> dict[str, int]:
        """Return the lengths of containers that are not kept."""
        found = {name: value for name, value in vars(self._owner).items() if name not in self._without}
        return {
            name: len(value) for name, value in found.items() if isinstance(value, _CONTAINERS) and not _is_plain(value)
        }

    def _plain(self) -> dict[str, object]:
        found = vars(self._owner).items()
        return {name: value for name, value in found if name not in self._without and _is_plain(value)}


def by_name(owners: Iterable[T]) -> dict[str, T]:
    """Return objects by class name, numbered from the second of a class on, so that names are the same on all ranks."""
    named: dict[str, T] = {}
    counts: Counter[str] = Counter()
    for owner in owners:
        name = type(owner).__name__
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} {counts[name]}"] = owner
    return named


def _by_name(value: object) -> bytes | None:
    """Return the pickle of a function or class of a module, which consists of its name; None for anything else."""
    if not isinstance(value, _NAMED_KINDS) or not isinstance(getattr(value, "__self__", None), _OWNERS):
        return None
    try:
        return pickle.dumps(value)
    except Exception:  # no module has it
        return None


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, _CONTAINERS):
        return all(map(_is_plain, value))
    if isinstance(value, enum.Enum):
        return _travels(type(value))
    return isinstance(value, _PLAIN) or _by_name(value) is not None


@functools.cache
def _travels(kind: type) -> bool:
    """Whether a class can be pickled, by its name or as it is."""
    try:
        cloudpickle.dumps(kind)
    except Exception:  # its methods use something that cannot be
        return False
    return True


def _kept(value: Any) -> Any:
    """Copy a tree of lists, tuples and dicts, and turn arrays into tensors, which commits copy and send efficiently."""
    if type(value) is dict:
        return {key: _kept(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    if type(value) is np.ndarray:
        with contextlib.suppress(TypeError):  # torch has no such type
            return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    name = _by_name(value)
    return value if name is None else {_NAMED: name}


def _given(value: Any) -> Any:
    """Undo ``_kept``."""
    if type(value) is dict:
        if _ARRAY in value:
            return value[_ARRAY].cpu().numpy().copy()
        return pickle.loads(value[_NAMED]) if _NAMED in value else {key: _given(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_given, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
