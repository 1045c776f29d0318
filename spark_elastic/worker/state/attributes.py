"""What an object of another library's, such as a callback, remembers in its attributes, as a commit keeps it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Collection, Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor)
# Marks an array, which a commit keeps as a tensor.
_ARRAY = "spark_elastic.array"


class Attributes:
    """The attributes of an object that training changes, if they are numbers, strings, arrays, or containers of these.

    An object with ``state_dict`` and ``load_state_dict`` says itself what it remembers. What training leaves alone is not
    kept: it may be another value on each rank.
    """

    def __init__(self, owner: Any, without: Collection[str] = ()) -> None:
        """Note what the attributes are now, as training begins, but for those named in ``without``."""
        self._owner = owner
        self._without = without
        self._has_state_dict = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
        self._first = {} if self._has_state_dict else {name: cloudpickle.dumps(value) for name, value in self._plain()}
        self._changed: set[str] = set()

    def values(self) -> Any:
        """Return what the object remembers now."""
        if self._has_state_dict:
            return self._owner.state_dict()
        now = dict(self._plain())
        self._changed |= {name for name, value in now.items() if self._first.get(name) != cloudpickle.dumps(value)}
        return {name: _kept(value) for name, value in now.items() if name in self._changed}

    def load(self, values: Any) -> None:
        """Have the object remember what another one, or itself, has remembered at a commit; None: at the beginning."""
        if self._has_state_dict:
            if values is not None:
                self._owner.load_state_dict(values)
            return
        vars(self._owner).update({name: pickle.loads(value) for name, value in self._first.items()})
        self._changed = set(values or ())
        vars(self._owner).update({name: _given(value) for name, value in (values or {}).items()})

    def _plain(self) -> list[tuple[str, Any]]:
        found = vars(self._owner).items()
        return [(name, value) for name, value in found if name not in self._without and _is_plain(value)]


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _kept(value: Any) -> Any:
    """Copy a tree of lists, tuples and dicts with tensors in place of arrays, which commits copy and send as such."""
    if type(value) is dict:
        return {key: _kept(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    if type(value) is np.ndarray:
        with contextlib.suppress(TypeError):  # torch has no such type
            return {_ARRAY: torch.from_numpy(value.copy())}
    return value


def _given(value: Any) -> Any:
    """Undo ``_kept``."""
    if type(value) is dict:
        return (
            value[_ARRAY].cpu().numpy().copy()
            if _ARRAY in value
            else {key: _given(each) for key, each in value.items()}
        )
    if type(value) in (list, tuple):
        return type(value)(map(_given, value))
    return value
