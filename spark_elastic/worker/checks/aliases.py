"""Finds objects that are in a State twice: each place is kept by value, so that they are two objects after a reset."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping

import numpy
import torch

from spark_elastic.worker.checks.training_code import depth_of_user

# What user code changes in place. Other objects, such as functions and enums, are often the same on purpose.
_CHANGED_IN_PLACE = (list, dict, OrderedDict, set, deque, defaultdict, Counter, numpy.ndarray, torch.Tensor)


def check_aliases(objects: Mapping[str, object]) -> None:
    """Warn of a container, an array or a tensor that is in two places. Raises ``ValueError`` for one that contains itself."""
    places: dict[int, str] = {}
    above: set[int] = set()

    def look(value: object, place: str) -> None:
        if id(value) in above:
            raise ValueError(
                f"state.{place} is a {type(value).__name__} that contains itself, which a State cannot copy"
            )
        if type(value) in _CHANGED_IN_PLACE:
            first = places.setdefault(id(value), place)
            if first != place:
                warnings.warn(
                    f"state.{first} and state.{place} are the same {type(value).__name__}, and a State keeps each by value: on "
                    "other ranks, and after a reset, they are two, and what is put into one is not in the other. Give it to the "
                    "State once",
                    stacklevel=depth_of_user(),
                )
                return
        above.add(id(value))
        for name, entry in _entries(value):
            look(entry, f"{place}[{name!r}]")
        above.discard(id(value))

    for name, value in objects.items():
        look(value, name)


def _entries(value: object) -> Iterable[tuple[object, object]]:
    if type(value) in (dict, OrderedDict):
        assert isinstance(value, dict)
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()
