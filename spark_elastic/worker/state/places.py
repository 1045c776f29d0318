"""Which objects are where in a State, so that what is loaded goes into the objects that it belongs to.

A commit holds content, and a State refers to objects that user code refers to as well: ``state.config["stage"] = STAGES[2]``. A
rank that goes back has the objects themselves. A newcomer, or a job that resumes, has the objects with which the script begins;
the commit says which places have been set to others since, and which of them are one object.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.worker.state.snapshot import has_state_dict

# Types of objects that may be large.
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple))
_LARGE = frozenset((torch.Tensor, numpy.ndarray))


class _Reference(weakref.ref[Any]):
    """Refers to an object in a State without keeping it alive; the class tells it from weak references of users."""


class Places:
    """The objects in a tree that are not plain values, by the names of their places, such as ``config['stage']``.

    ``same`` maps the name of a place to that of the first one where the same object is. Tensors and arrays, which may be large,
    are not kept alive.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._objects: dict[str, object] = {}
        self.same: dict[str, str] = {}
        # By the ids of objects, their first places.
        first: dict[int, str] = {}
        # Names that two places have, because two keys of a dict look alike. Such a name says nothing.
        twice: set[str] = set()
        for name, value in values.items():
            if type(value) not in PLAIN:
                self._look(value, name, first, twice)
        if twice:
            self._objects = {name: value for name, value in self._objects.items() if name not in twice}
            self.same = {name: earlier for name, earlier in self.same.items() if twice.isdisjoint((name, earlier))}

    def _look(self, value: Any, name: str, first: dict[int, str], twice: set[str]) -> None:
        kind = type(value)
        if kind is not tuple:
            if name in self._objects:
                twice.add(name)
            self._objects[name] = _Reference(value) if kind in _LARGE else value
            earlier = first.setdefault(id(value), name)
            if earlier != name:
                self.same[name] = earlier
        if kind not in _CONTAINERS:
            return
        is_dict = kind is dict or kind is OrderedDict
        if PLAIN.issuperset(map(type, value.values() if is_dict else value)):
            return  # the usual case
        for key, entry in value.items() if is_dict else enumerate(value):
            if type(entry) not in PLAIN:
                self._look(entry, f"{name}[{key!r}]", first, twice)

    def at(self, name: str) -> object:
        """Return the object that was at a place; None if it is plain, or gone."""
        found = self._objects.get(name)
        return found() if type(found) is _Reference else found

    def kept(self) -> Iterable[tuple[str, object]]:
        """Return the places with their objects, without tensors and arrays."""
        return ((name, value) for name, value in self._objects.items() if type(value) is not _Reference)

    def rebound(self, first: Places) -> list[str]:
        """Return the places where there are other objects than there were at first. Objects with a state dict do not count."""
        pairs = ((name, self.at(name), first.at(name)) for name in self._objects if name in first._objects)
        return [name for name, now, then in pairs if now is not then and not has_state_dict(then)]
