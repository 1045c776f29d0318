"""Which objects are where in a State, so that what is loaded goes into the objects that it belongs to.

A commit holds content, and a State refers to objects that user code refers to as well: ``state.config["stage"] = STAGES[2]``. A
rank that goes back has the objects themselves. A newcomer, or a job that resumes, has the objects with which the script begins;
the commit says which places have been set to others since, and which of them are one object.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import numpy
import torch

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.worker.state.snapshot import has_state_dict


class Places:
    """The objects in a tree that are not plain values, by the names of their places, such as ``config['stage']``.

    ``same`` maps the name of a place to that of the first one where the same object is. Tensors and arrays, which may be large,
    are not kept alive.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._objects: dict[str, Callable[[], object]] = {}
        self.same: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, value in _objects(values):
            if name in self._objects:  # two keys look alike, so the name says nothing
                self._objects[name] = _nothing
                continue
            self._objects[name] = _referring(value)
            earlier = first.setdefault(id(value), name)
            if earlier != name:
                self.same[name] = earlier

    def at(self, name: str) -> object:
        """Return the object that was at a place; None if it is plain, or gone."""
        return self._objects.get(name, _nothing)()

    def rebound(self, first: Places) -> list[str]:
        """Return the places where there are other objects than there were at first. Objects with a state dict do not count."""
        pairs = ((name, self.at(name), first.at(name)) for name in self._objects if name in first._objects)
        return [name for name, now, then in pairs if now is not then and not has_state_dict(then)]


def _objects(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the objects in a tree, containers included, with the names of their places."""

    def look(value: object, name: str) -> Iterator[tuple[str, object]]:
        kind = type(value)
        if kind is not tuple:
            yield name, value
        if isinstance(value, dict) and kind in (dict, OrderedDict):
            entries: Iterator[tuple[object, object]] = iter(value.items())
        elif isinstance(value, (list, tuple)) and kind in (list, tuple):
            entries = enumerate(value)
        else:
            return
        for key, entry in entries:
            if type(entry) not in PLAIN:
                yield from look(entry, f"{name}[{key!r}]")

    for name, value in values.items():
        if type(value) not in PLAIN:
            yield from look(value, name)


def _nothing() -> None:
    return None


def _referring(value: object) -> Callable[[], object]:
    return weakref.ref(value) if isinstance(value, (torch.Tensor, numpy.ndarray)) else lambda: value
