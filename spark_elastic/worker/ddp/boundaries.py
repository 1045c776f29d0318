"""Marks where gradients flow into a forward of a wrapped model, and out of it, so that they are weighted there."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.distributions import Distribution, Transform
from torch.utils import _pytree as pytree

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.data.deliveries import Delivery, deliveries
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.reachable import LENGTH
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.ddp.weighting import Boundary, Forward, mark_view, weighting
from spark_elastic.worker.state.inference import versions_of

# Containers that a model may fill, or look into afterwards, so that it is given the caller's own.
_FILLED = (list, dict, OrderedDict, defaultdict, deque)
# The classes of whose results a warning has told.
_told: set[type] = set()


def tensors_given(args: tuple[object, ...], kwargs: dict[str, object]) -> list[torch.Tensor]:
    """Return the tensors that a forward is given."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return tensors if len(tensors) == len(args) and not kwargs else list(tensors_of((args, kwargs)))


def tensors_of(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that a forward is given or returns, and that can be marked."""
    return _tensors_in(values, set())


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) not in PLAIN and id(value) not in seen:
        seen.add(id(value))
        entries, spec = _split(value)
        for entry in _opened(value).values() if spec is None else entries:
            yield from _tensors_in(entry, seen)


def _split(value: object) -> tuple[list[Any], Any]:
    """Return the entries of a container that torch knows, and how to put it together; no entries and None for all else."""
    entries, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    return ([], None) if spec.is_leaf() else (entries, spec)


@contextmanager
def marked_inputs(values: object, forward: Forward) -> Iterator[Any]:
    """Have a forward be given these values with tensors marked through which gradients flow out of it.

    A container or dataclass is the caller's own, which has its own tensors back afterwards, and whatever the model put there.
    """
    marks = _InputMarks(forward)
    try:
        yield marks.apply(values)
    finally:
        marks.put_back()


class _Marks(ABC):
    """Puts marked tensors in the place of those in containers that torch knows, dataclasses and torch's distributions."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        # What stands for an object, by its id, so that one that is there twice stays one. No other object may get that id.
        self._seen: dict[int, tuple[object, object]] = {}

    def apply(self, value: Any) -> Any:
        """Return what stands for a value: itself, if it neither is nor holds a tensor to be marked."""
        if type(value) in PLAIN:
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value, value
            self._seen[id(value)] = value, self._mark(value) if isinstance(value, torch.Tensor) else self._enter(value)
        return self._seen[id(value)][1]

    @abstractmethod
    def _mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor."""

    @abstractmethod
    def _enter(self, value: Any) -> Any:
        """Return what stands for anything else."""


class _InputMarks(_Marks):
    """Fills the caller's own containers and dataclasses, and makes others anew."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        # The tensor of the caller by the id of the one that stands for it, and what holds one.
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._filled: list[Any] = []
        self._versions: list[int] = []

    def _mark(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        marked = mark_view(tensor, self._forward)
        self._own[id(marked)] = tensor, marked
        self._versions += versions_of([tensor])
        return marked

    def _enter(self, value: Any) -> Any:
        if type(value) not in _FILLED and (opened := _opened(value)):
            entries, spec = list(opened.values()), None
        else:
            entries, spec = _split(value)
        marked = [self.apply(entry) for entry in entries]
        if all(one is other for one, other in zip(marked, entries, strict=True)):
            return value
        if spec is not None and type(value) not in _FILLED:
            return pytree.tree_unflatten(marked, spec)
        self._filled.append(value)
        _fill(value, self.apply)
        return value

    def put_back(self) -> None:
        """Give containers the caller's tensors back, and note if the model has changed one of these in place."""
        if self._versions != versions_of(tensor for tensor, _ in self._own.values()):
            self._forward.changes_inputs()
        for holder in self._filled:
            _fill(holder, lambda entry: self._own.get(id(entry), (entry,))[0])


def refuse_changed_inputs(module: torch.nn.Module) -> NoReturn:
    """Raise ``TrainingCodeError``: gradients that leave a forward cannot be weighted where an input was written to."""
    raise TrainingCodeError(
        f"{type(module).__name__} changes a tensor in place that it was given, and one loss has batches of which this rank has "
        "different shares, so the gradient of that tensor cannot be weighted: have the model change a clone (no inplace=True in "
        "its first layer), or call backward for each batch"
    )


def mark_outputs(values: Any, forward: Forward, batch: Delivery | None) -> Any:
    """Return what a forward returned, with tensors marked through which gradients flow into it. They are noted for the batch.

    Warns of objects that cannot be marked, where batches of several loaders may be in one loss.
    """
    if not isinstance(values, torch.Tensor) and deliveries.are_of_several_loaders():
        _warn_of_unmarked(values)
    return _OutputMarks(forward, batch, values).apply(values)


def refuse_transforms(module: torch.nn.Module, inputs: list[torch.Tensor]) -> None:
    """Raise ``TrainingCodeError`` within a transform of ``torch.func``, and for inputs with a tangent: these hide the marks."""
    # Others have no tangents.
    plain = (value for value in inputs if value.layout is torch.strided and not value.is_nested)
    if torch._C._are_functorch_transforms_active() or any(unpack_dual(value).tangent is not None for value in plain):
        raise TrainingCodeError(
            f"{type(module).__name__} is called by its wrapper within a transform of torch.func (grad, vmap, jacrev, …), or with "
            "inputs that have a tangent (forward-mode differentiation). The wrapper averages gradients of backward passes alone. "
            "For derivatives that are part of a loss, write torch.autograd.grad(outputs, inputs, create_graph=True) over the "
            "wrapper's outputs; for those that no weight is trained by, call model.module in place of the wrapper"
        )


class _OutputMarks(_Marks):
    """Copies whatever holds a tensor."""

    def __init__(self, forward: Forward, batch: Delivery | None, values: object) -> None:
        super().__init__(forward)
        self._batch = batch
        self._shared = _shared_bases(() if isinstance(values, torch.Tensor) else tensors_of(values))

    def _mark(self, tensor: torch.Tensor) -> torch.Tensor:
        marked = tensor
        if tensor.requires_grad:
            if _base_of(tensor) in self._shared:
                marked = mark_view(tensor, self._forward, is_leaving=True)
            else:
                marked = Boundary.apply(tensor, (self._forward, weighting), True, 1.0)  # type: ignore[no-untyped-call]
        if self._batch is not None:
            deliveries.becomes(self._batch, marked)
        return marked

    def _enter(self, value: Any) -> Any:
        entries, spec = _split(value)
        if spec is not None:
            return pytree.tree_unflatten([self.apply(entry) for entry in entries], spec)
        if _opened(value):
            value = copy.copy(value)
            _fill(value, self.apply)
        return value


def _shared_bases(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Find what several of these tensors are views of: what is written to one has to reach the others' gradients."""
    count = Counter(map(_base_of, {id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values()))
    return {base for base, views in count.items() if views > 1}


def _base_of(tensor: torch.Tensor) -> int:
    return id(tensor if tensor._base is None else tensor._base)


def _fill(holder: Any, replace: Callable[[Any], Any]) -> None:
    """Put what ``replace`` returns in the place of entries of a container, or of attributes of a dataclass."""
    is_container = type(holder) in _FILLED
    entries = _opened(holder) if not is_container else holder if isinstance(holder, dict) else dict(enumerate(holder))
    for key, entry in list(entries.items()):
        if (new := replace(entry)) is entry:
            continue
        if is_container:
            holder[key] = new
        else:
            object.__setattr__(holder, key, new)


def _opened(value: object) -> dict[str, Any]:
    """Return the attributes of an object whose tensors are marked; none for any other object, which may be one of a kind."""
    if isinstance(value, type):
        return {}
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
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
