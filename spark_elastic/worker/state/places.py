"""Which objects are where in a State, so that what is loaded goes into the objects that it belongs to.

A commit holds content, and a State refers to objects that user code refers to as well: ``state.config["stage"] = STAGES[2]``. A
rank that goes back has the objects themselves. A newcomer, or a job that resumes, has the objects with which the script begins;
the commit says which places have been set to others since, and which of them are one object.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch

from spark_elastic.checkpoint.skeleton import PLAIN, has_plain_keys
from spark_elastic.worker.state.snapshot import Stateful, has_state_dict

_CONTAINERS = frozenset((dict, OrderedDict, list, tuple))
# Types of objects that may be large. Whoever holds a commit holds its modules and optimizers besides.
_LARGE = (torch.Tensor, numpy.ndarray, torch.nn.Module, torch.optim.Optimizer)


class _Reference(weakref.ref[object]):
    """Refers to an object in a State without keeping it alive; the class tells it from weak references of users."""

    is_stateful: bool


class Places:
    """The objects in a tree that are not plain values, by the names of their places, such as ``config['stage']``.

    ``same`` maps the name of a place to that of another one with the same object: one that has had it since ``first``, if there
    is such a place. Tensors, arrays, modules and optimizers are not kept alive, unless a container holds them that is.
    """

    def __init__(self, values: Mapping[str, object], first: Places | None = None) -> None:
        self._objects: dict[str, object] = {}
        # By the ids of objects, their first places; and by these, the others.
        found: dict[int, str] = {}
        shared: defaultdict[str, list[str]] = defaultdict(list)
        containers: deque[tuple[str, object]] = deque()
        entries: Iterable[tuple[str, object]] = values.items()
        while True:
            for name, value in entries:
                kind = type(value)
                if kind in PLAIN:
                    continue
                if kind is not tuple:
                    self._objects[name] = _refer(value) if isinstance(value, _LARGE) else value
                    earlier = found.setdefault(id(value), name)
                    if earlier != name:
                        shared[earlier].append(name)
                        continue  # what it holds is known
                if kind in _CONTAINERS:
                    containers.append((name, value))
            if not containers:
                break
            entries = _entries(*containers.popleft())
        self.same = self._choose(shared, first) if shared else {}

    def _choose(self, shared: Mapping[str, list[str]], first: Places | None) -> dict[str, str]:
        same: dict[str, str] = {}
        for earliest, others in shared.items():
            places, value = [earliest, *others], self.at(earliest)
            chosen = earliest if first is None else next((name for name in places if first.at(name) is value), earliest)
            same.update((name, chosen) for name in places if name != chosen)
        return same

    def at(self, name: str) -> Any:
        """Return the object that was at a place; None if it is plain, or gone."""
        found = self._objects.get(name)
        if type(found) is _Reference:
            found = found()
            if isinstance(found, torch.Tensor) and hasattr(found, "_fix_weakref"):
                found._fix_weakref()  # as torch.utils.weak does: only C++ may have held it
        return found

    def holds(self, value: object) -> bool:
        """Whether an object was at any place."""
        return any(self.at(name) is value for name in self._objects)

    def stateful(self) -> dict[str, Stateful]:
        """Return the objects with a state dict that were there, by the names of their places, without those that are gone."""
        found = {name: self.at(name) for name in self._objects if self._is_stateful(name)}
        return {name: value for name, value in found.items() if value is not None}

    def rebound(self, first: Places) -> list[str]:
        """Return the places where there are other objects than there were at first. Objects with a state dict do not count."""
        both = (name for name in self._objects if name in first._objects)
        return [name for name in both if self.at(name) is not first.at(name) and not first._is_stateful(name)]

    def _is_stateful(self, name: str) -> bool:
        found = self._objects[name]
        return found.is_stateful if isinstance(found, _Reference) else has_state_dict(found)


def _refer(value: object) -> _Reference:
    reference = _Reference(value)
    reference.is_stateful = not isinstance(value, (torch.Tensor, numpy.ndarray))
    return reference


def _entries(name: str, container: Any) -> Iterable[tuple[str, object]]:
    """Return what a container holds, with the names of its places. As everywhere, a dict with other keys is no container."""
    if not isinstance(container, dict):
        if PLAIN.issuperset(map(type, container)):
            return ()
        return ((f"{name}[{place}]", value) for place, value in enumerate(container) if type(value) not in PLAIN)
    if PLAIN.issuperset(map(type, container.values())) or not has_plain_keys(container):
        return ()
    return ((f"{name}[{key!r}]", value) for key, value in container.items() if type(value) not in PLAIN)
