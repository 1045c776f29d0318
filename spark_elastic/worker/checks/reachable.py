"""Looks into the objects of a State, as far as their training can depend on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.optim.lr_scheduler import LRScheduler

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.data.loader import TakesWorld, has_part

# How deep the objects of a State are searched.
DEPTH = 5
# Containers with more entries than this hold data and are not searched.
LENGTH = 1000


def reachable(tree: object, depth: int = DEPTH) -> Iterator[object]:
    """Yield the objects in a tree, and those in their containers and attributes, except for the optimizer of a scheduler."""
    seen: set[int] = set()

    def look(value: object, left: int) -> Iterator[object]:
        if type(value) in PLAIN or isinstance(value, (torch.Tensor, type)) or id(value) in seen or left < 0:
            return
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            if len(value) > LENGTH:
                return
            entries: Iterable[object] = value.values() if isinstance(value, dict) else value
        else:
            yield value
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or has_part(value, TakesWorld):
                return
            attributes = getattr(value, "__dict__", {})
            entries = [
                entry for name, entry in attributes.items() if not isinstance(value, LRScheduler) or name != "optimizer"
            ]
        for entry in list(entries):
            yield from look(entry, left - 1)

    yield from look(tree, depth)


def find_optimizers(tree: object) -> list[torch.optim.Optimizer]:
    """Find the optimizers in a tree, including those inside its objects."""
    return [value for value in reachable(tree) if isinstance(value, torch.optim.Optimizer)]
