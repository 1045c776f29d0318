"""Marks where gradients flow into a forward of a wrapped model, and out of it, so that they are weighted there."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributions import Distribution, Transform
from torch.utils import _pytree as pytree

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.data.deliveries import Delivery, deliveries
from spark_elastic.worker.checks.reachable import LENGTH
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.weighting import Boundary, Forward, weighting

# The classes of whose results a warning has told.
_told: set[type] = set()


def tensors_of(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that a forward is given or returns, and that can be marked."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif type(leaf) not in PLAIN:
            yield from tensors_of(list(_opened(leaf).values()))


def mark_inputs(values: Any, forward: Forward) -> Any:
    """Return what a forward is given, with tensors marked through which gradients flow out of it."""
    return _Marks(forward, None, is_leaving=False).apply(values)


def mark_outputs(values: Any, forward: Forward, batch: Delivery | None) -> Any:
    """Return what a forward returned, with tensors marked through which gradients flow into it. They are noted for the batch.

    Warns of objects that cannot be marked, where batches of several loaders may be in one loss.
    """
    if not isinstance(values, torch.Tensor) and deliveries.are_of_several_loaders():
        _warn_of_unmarked(values)
    return _Marks(forward, batch, is_leaving=True).apply(values)


class _Marks:
    """Marks the tensors in containers that torch knows, and in copies of dataclasses and of torch's distributions."""

    def __init__(self, forward: Forward, batch: Delivery | None, is_leaving: bool) -> None:
        self._forward = forward
        self._batch = batch
        self._is_leaving = is_leaving

    def apply(self, values: object) -> object:
        """Return the values with their tensors marked."""
        return self._leaf(values) if isinstance(values, torch.Tensor) else pytree.tree_map(self._leaf, values)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                value = Boundary.apply(value, (self._forward, weighting), self._is_leaving, 1.0)  # type: ignore[no-untyped-call]
            if self._batch is not None:
                deliveries.becomes(self._batch, value)
        elif type(value) not in PLAIN and (opened := _opened(value)):
            value = copy.copy(value)
            for name, entry in opened.items():
                object.__setattr__(value, name, self.apply(entry))
        return value


def _opened(value: object) -> dict[str, object]:
    """Return the attributes of an object that is copied to be marked; none for any other object, which may be one of a kind."""
    if isinstance(value, type):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value)) if isinstance(value, (Distribution, Transform)) else {}


def _warn_of_unmarked(values: object) -> None:
    for leaf in pytree.tree_leaves(values):
        kind = type(leaf)
        if kind in PLAIN or kind in _told or isinstance(leaf, (torch.Tensor, torch.nn.Module)) or _opened(leaf):
            continue
        held = leaf.values() if isinstance(leaf, dict) else getattr(leaf, "__dict__", {}).values()
        parts = (part for each in held for part in (each[:LENGTH] if isinstance(each, (list, tuple)) else [each]))
        if any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts):
            _told.add(kind)
            warnings.warn(
                f"a model has returned a {kind.__name__}, whose tensors cannot be told from others: if batches of several "
                "loaders are in one loss, all gradients get the weight of the same batch. Return tensors, in lists, dicts or a "
                "dataclass, and make the object of them outside the model",
                stacklevel=depth_of_user(),
            )
