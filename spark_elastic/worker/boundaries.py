"""Marks where gradients flow into a forward of a wrapped model, and out of it, so that they are weighted there."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.data.deliveries import Delivery, deliveries
from spark_elastic.worker.weighting import Boundary, Forward, weighting

# How deep attributes of objects are searched for tensors: those of distributions hold distributions.
_DEPTH = 3
# The attributes that every module has.
_OF_TORCH = frozenset(vars(nn.Module()))


def mark_inputs(values: Any, forward: Forward) -> Any:
    """Return what a forward is given, with tensors marked through which gradients flow out of it."""
    return _Marks(forward, None, is_leaving=False).apply(values)


def mark_outputs(module: nn.Module, values: Any, forward: Forward, batch: Delivery | None) -> Any:
    """Return what a forward returned, with tensors marked through which gradients flow into it. They are noted for the batch.

    Where the forwards of a backward pass may have different weights, tensors that the module keeps besides, such as losses, are
    marked in place.
    """
    marks = _Marks(forward, batch, is_leaving=True)
    if weighting.is_at_outputs or deliveries.are_of_several_loaders():
        for part in module.modules():
            for name, value in vars(part).items():
                if type(value) in PLAIN or name in _OF_TORCH:
                    continue
                if any(map(_can_be_marked, pytree.tree_leaves(value))):
                    vars(part)[name] = pytree.tree_map(lambda v: marks.apply(v) if _can_be_marked(v) else v, value)
    return marks.apply(values)


def _can_be_marked(value: object) -> bool:
    """Whether a forward has made this tensor, and its gradient is not looked at, which would be that of another one then."""
    is_made = isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf and not value.retains_grad
    return is_made and not isinstance(value.grad_fn, Boundary._backward_cls)  # type: ignore[attr-defined]


class _Marks:
    """Marks the tensors in containers that torch knows, and in attributes of dataclasses and other objects, which are copied."""

    def __init__(self, forward: Forward, batch: Delivery | None, is_leaving: bool) -> None:
        self._forward = forward
        self._batch = batch
        self._is_leaving = is_leaving

    def apply(self, values: Any, depth: int = 0) -> Any:
        """Return the values with their tensors marked."""
        if isinstance(values, torch.Tensor):
            return self._tensor(values)
        return pytree.tree_map(lambda value: self._leaf(value, depth), values)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.requires_grad:
            value = Boundary.apply(value, (self._forward, weighting), self._is_leaving, 1.0)  # type: ignore[no-untyped-call]
        if self._batch is not None:
            deliveries.becomes(self._batch, value)
        return value

    def _leaf(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if not any(tensor.requires_grad for tensor in _tensors(value, depth)):
            return value
        marked = copy.copy(value)
        for name, entry in _attributes(marked).items():
            object.__setattr__(marked, name, self.apply(entry, depth + 1))
        return marked


def _attributes(value: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors in the attributes of an object, other than a module's."""
    if type(value) in PLAIN or isinstance(value, (type, nn.Module)) or depth >= _DEPTH:
        return
    for leaf in pytree.tree_leaves(_attributes(value)):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        else:
            yield from _tensors(leaf, depth + 1)
