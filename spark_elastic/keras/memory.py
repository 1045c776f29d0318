"""What callbacks remember between epochs, as a commit keeps it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle
import keras
import numpy as np
import torch

# What Keras sets.
_OF_KERAS = ("model", "_model", "params")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor)
# Marks an array, which a commit keeps as a tensor.
_ARRAY = "spark_elastic.array"


class Memory:
    """The attributes of a callback that training changes, if they are numbers, strings, arrays, or containers of these.

    A callback with ``state_dict`` and ``load_state_dict`` says itself what it remembers. What training leaves alone is not
    kept: it may be another value on each rank.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        """Note what the attributes are now, as training begins."""
        self._callback = callback
        self._has_state_dict = hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        self._first = (
            {} if self._has_state_dict else {name: cloudpickle.dumps(value) for name, value in self._attributes()}
        )
        self._changed: set[str] = set()

    def values(self) -> Any:
        """Return what the callback remembers now."""
        if self._has_state_dict:
            return self._callback.state_dict()
        now = dict(self._attributes())
        self._changed |= {name for name, value in now.items() if self._first.get(name) != cloudpickle.dumps(value)}
        return {name: _kept(value) for name, value in now.items() if name in self._changed}

    def load(self, values: Any) -> None:
        """Have the callback remember what another one, or itself, has remembered at a commit; None: at the beginning."""
        if self._has_state_dict:
            if values is not None:
                self._callback.load_state_dict(values)
            return
        vars(self._callback).update({name: pickle.loads(value) for name, value in self._first.items()})
        self._changed = set(values or ())
        vars(self._callback).update({name: _given(value) for name, value in (values or {}).items()})

    def _attributes(self) -> list[tuple[str, Any]]:
        found = vars(self._callback).items()
        return [(name, value) for name, value in found if name not in _OF_KERAS and _is_plain(value)]


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
