"""Snapshots of a state: tensors in flat buffers that are kept, everything else by value.

A commit copies into one of two buffers and switches over when the copy is complete, so the last intact copy is never touched.
The copy is ``torch._foreach_copy_`` into views of one flat tensor per dtype and device: nothing is allocated from the second
commit on, and each flat tensor travels to a newcomer in one piece.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import numpy
import torch

from spark_elastic.checkpoint.skeleton import PLAIN, Leaf, StateDict, TensorSpec, Tree, has_plain_keys, map_tree
from spark_elastic.data.loader import PositionedLoader
from spark_elastic.worker.checks.live_memory import memory_in, refuse_live
from spark_elastic.worker.checks.unsupported import check_functions, check_supported, why_unsupported
from spark_elastic.worker.state.pending_copy import PendingCopy, pending_copy
from spark_elastic.worker.state.switches import note_switches
from spark_elastic.worker.state.torchdata_position import read_forward

if TYPE_CHECKING:
    from spark_elastic.worker.state.places import Places
    from spark_elastic.worker.state.templates import Templates

T = TypeVar("T")


class Stateful(Protocol):
    """An object that is saved and restored through a state dict: a module, an optimizer, a scheduler, a loader."""

    def state_dict(self) -> object:
        """Return the object's state."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Set the object back to a state."""


class KeptPart(ABC):
    """A keeper's copy of an object that has a state dict, where the keeper copies something other than the state dict.

    Other ranks and durable checkpoints always get state dicts: the keeper's ``lend`` and ``catch_up`` see to that.
    """

    @abstractmethod
    def load_into(self, target: Stateful) -> None:
        """Set the object back to what was kept of it."""


Keep = Callable[[Stateful], "StateDict | KeptPart"]


@dataclass(slots=True)
class Found:
    """The parts taken out of a tree: tensors, uncopied; which of them are constants; and objects with a state dict."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    objects: list[Stateful] = field(default_factory=list)


class CannotCopyError(TypeError):
    """A commit cannot copy ``value``, which lies in the tree itself or, if ``owner`` is given, in what is kept of that object."""

    def __init__(self, value: object, owner: Stateful | None, reason: Exception) -> None:
        super().__init__(f"a {type(value).__name__} in the State cannot be copied: {reason}")
        self.value, self.owner, self.reason = value, owner, reason

    def named(self, values: Mapping[str, object]) -> TypeError:
        """Return the error that users get: it says in which of a State's attributes the value is, and what to do about it."""
        kind = type(self.value).__name__
        sought = self.value if self.owner is None else self.owner
        place = next((f"state.{name}" for name, each in leaves(values) if each is sought), "what is in the State")
        what = f"{place} is" if self.owner is None else f"the state_dict of {place} has"
        advice = (
            "keep it outside the State, also outside local=, of which commits copy the objects, too. An object of a class of "
            "yours may stay if it has state_dict and load_state_dict, which leave out what cannot be copied"
            if self.owner is None
            else "leave it out of the state_dict, or keep the object outside the State"
        )
        return TypeError(f"{what} a {kind}, which a commit cannot copy ({self.reason}): {advice}")


def has_state_dict(value: object) -> TypeGuard[Stateful]:
    """Whether an object is saved and restored through a state dict. A class has the methods, and no state."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def find_objects(tree: Mapping[str, object]) -> dict[str, Stateful]:
    """Find the objects with a state dict in a tree of dicts, lists and tuples, by the names of their places."""
    return {
        name: value for name, value in leaves(tree) if not isinstance(value, torch.Tensor) and has_state_dict(value)
    }


def find_trained_tensors(tree: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Find the tensors in such a tree that collect gradients, by the names of their places."""
    return {
        name: value
        for name, value in leaves(tree)
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    }


def leaves(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield what is neither a container nor plain, with the name of its place."""

    def look(value: Tree, name: str) -> Iterator[tuple[str, object]]:
        kind: object = type(value)
        if kind in (dict, OrderedDict) and has_plain_keys(value):
            for key, entry in value.items():
                yield from look(entry, f"{name}[{key!r}]")
        elif kind in (list, tuple):
            for place, entry in enumerate(value):
                yield from look(entry, f"{name}[{place}]")
        elif kind not in PLAIN:
            yield name, value

    for name, value in tree.items():
        yield from look(value, name)


def as_state_dict(value: Stateful) -> StateDict:
    """Return the state dict of an object, with the switches of a module noted in it."""
    read_forward(value)
    content = value.state_dict()
    if isinstance(value, torch.nn.Module):
        note_switches(value, content)
    return StateDict(content)


def flatten(tree: object, found: Found, keep: Keep = as_state_dict, remembered: Templates | None = None) -> object:
    """Copy a tree; its tensors are added to ``found`` uncopied, with a ``Leaf`` in their place.

    Objects with a state dict, wherever they are in the tree, are added to ``found``, too, and what ``keep`` returns for each is
    copied; with ``remembered``, ``keep`` is called only for those that have changed. Other mutable objects are deep-copied.
    Raises ``CannotCopyError``, which is a ``TypeError``, for an object that cannot be copied.
    """
    holders: list[_Holder] = []
    # The copies of objects, by the ids of the originals: what two objects share, their copies share.
    copies: dict[int, object] = {}
    # The object with a state dict whose parts are being taken.
    owner: Stateful | None = None

    def take(value: object) -> object:
        if isinstance(value, torch.Tensor):
            if why_unsupported(value) is not None:
                check_supported(value, "what has been put into the State")
            if is_constant(value):
                found.constants.append(len(found.tensors))
            found.tensors.append(value.detach() if value.requires_grad else value)
            return Leaf(len(found.tensors) - 1, owner is None and value.requires_grad and value.is_leaf)
        # A state dict may put the same array out again and again.
        return value if type(value) in PLAIN else _deep_copy(value, copies if owner is None else {}, holders, owner)

    def take_or_keep(value: object) -> object:
        nonlocal owner
        if type(value) in PLAIN or isinstance(value, torch.Tensor) or not has_state_dict(value):
            return take(value)
        if why_unsupported(value) is not None:
            check_supported(value, "what has been put into the State")
        found.objects.append(value)
        owner = value
        if remembered is None:
            kept = map_tree(take, keep(value))
        else:
            kept = remembered.part_of(found, take, lambda: map_tree(take, keep(value)))
        owner = None
        return kept

    skeleton = map_tree(take_or_keep, tree)
    if remembered is not None:
        remembered.end(found)
    if holders:
        _check_holders(holders, found.objects, set() if remembered is None else remembered.checked)
    return skeleton


@dataclass(frozen=True, slots=True)
class _Holder:
    """An object that was copied by value: the ids of the parameters in it, and all tensors and arrays in it."""

    value: object
    parameters: set[int]
    tensors: list[object]


def _deep_copy(value: object, copies: dict[int, Any], holders: list[_Holder], owner: Stateful | None) -> object:
    """Copy an object that has no state dict. If it holds parameters, tensors or arrays, add it to ``holders``.

    An object that holds an optimizer or a loader is refused: training would continue with the original rather than the copy.
    """
    known, known_originals = len(copies), len(copies.get(id(copies), ()))
    try:
        copied = copy.deepcopy(value, copies)
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        raise CannotCopyError(value, owner, error) from error
    copied_now = dict(itertools.islice(reversed(copies.items()), len(copies) - known))
    for entry in (value, *copied_now.values()):
        check_functions(entry)
    held = next(
        (entry for entry in copied_now.values() if isinstance(entry, (torch.optim.Optimizer, PositionedLoader))), None
    )
    if held is not None:
        what = "loader" if isinstance(held, PositionedLoader) else "optimizer"
        raise TypeError(
            f"a {type(value).__name__} in the State holds the {what} {type(held).__name__} and would be copied by value, and the "
            f"{what} with it; give the {what} itself to the State (lists, tuples and plain dicts may hold it), and give "
            f"{type(value).__name__} the methods state_dict and load_state_dict, which leave it out, or keep it out of the State"
        )
    parameters = {number for number, entry in copied_now.items() if isinstance(entry, torch.nn.Parameter)}
    originals = copies.get(id(copies), [])[known_originals:]  # deepcopy keeps a list of them
    tensors: list[object] = [entry for entry in originals if isinstance(entry, (torch.Tensor, numpy.ndarray))]
    if parameters or tensors:
        holders.append(_Holder(value, parameters, [] if owner is not None else tensors))
    return copied


def _check_holders(holders: Sequence[_Holder], objects: Sequence[Stateful], checked: set[int]) -> None:
    """Refuse objects that were copied by value with parameters, or memory, of what goes through its state dict.

    ``checked``: the addresses of memory that earlier commits have looked at; those of this one are added.
    """
    modules = [value for value in objects if isinstance(value, torch.nn.Module)]
    has_parameters = any(holder.parameters for holder in holders)
    names = {id(value): name for module in modules if has_parameters for name, value in module.named_parameters()}
    for holder in holders:
        if held := [names[number] for number in holder.parameters if number in names]:
            kind = type(holder.value).__name__
            named = f"a {kind}" + (f", {holder.value.__qualname__}," if hasattr(holder.value, "__qualname__") else "")
            raise TypeError(
                f"{named} in the State holds {min(held)}, a parameter of a module of the State, and would be copied by value, "
                f"and the parameter with it: after a reset it would hold one that nobody trains. Give {kind} the methods "
                "state_dict and load_state_dict, which leave the parameter out, or keep it out of the State"
            )
        addresses = {address for value in holder.tensors for address, _ in memory_in(value, "") if address}
        refuse_live(holder.value, addresses - checked, objects)
        checked |= addresses


def unflatten(skeleton: object, tensors: list[torch.Tensor], copies: bool = True) -> object:
    """Rebuild the tree with each ``Leaf`` replaced by its tensor, which is the snapshot's own.

    Everything else is copied, except that with ``copies`` False other objects are the snapshot's own, too.
    """
    copied: dict[int, object] = {}

    def give(value: object) -> object:
        if type(value) is Leaf:
            return tensors[value.index].detach().requires_grad_() if value.is_learned else tensors[value.index]
        return value if not copies or type(value) in PLAIN else copy.deepcopy(value, copied)

    return map_tree(give, skeleton)


def cloned(tree: T) -> T:
    """Copy a tree, its tensors included."""
    copied: T = map_tree(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, tree)
    return copied


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return an immutable copy on the CPU: a commit into a buffer that already holds it does not copy it again."""
    kept = tensor.detach().to("cpu", copy=True)
    kept.is_constant = True  # type: ignore[attr-defined]
    return kept


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made by ``constant``, and so never changes."""
    return getattr(tensor, "is_constant", False)


_dtype, _shape, _device = map(operator.attrgetter, ("dtype", "shape", "device"))


@dataclass(slots=True)
class TensorBuffer:
    """Room for a list of tensors: one flat tensor per (dtype, device), and a view of it per tensor.

    ``on_host`` places it in the memory of the CPU, pinned if CUDA is in use. ``held`` has the constants that have been copied
    in, by their numbers, each with its version.
    """

    on_host: bool = False
    specs: tuple[TensorSpec, ...] = ()
    flats: list[torch.Tensor] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    held: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    # The properties that have to be equal for tensors to fit. Reading them from the views each time would take twice as long.
    _kinds: tuple[list[object], ...] = ()

    def fit(self, specs: tuple[TensorSpec, ...]) -> None:
        """Make room for tensors of these specs. Present room for the same specs is kept."""
        self.held = {}
        self._kinds = ()
        if specs == self.specs and self.flats:
            return
        sizes: dict[tuple[torch.dtype, str], int] = {}
        places = []
        for spec in specs:
            key = (spec.dtype, spec.device)
            places.append(sizes.get(key, 0))
            sizes[key] = places[-1] + math.prod(spec.shape)
        self.flats = []  # the old room is freed before the new one is allocated
        self.views = []
        flats = {
            (dtype, device): torch.empty(
                count, dtype=dtype, device=device, pin_memory=self.on_host and torch.cuda.is_initialized()
            )
            for (dtype, device), count in sizes.items()
        }
        self.flats = list(flats.values())
        self.views = [
            flats[spec.dtype, spec.device][start : start + math.prod(spec.shape)].view(spec.shape)
            for spec, start in zip(specs, places, strict=True)
        ]
        self.specs = specs

    def copy_from(self, tensors: list[torch.Tensor], constants: Sequence[int] = ()) -> PendingCopy | None:
        """Copy the tensors in, except for constants that have been copied already. ``constants`` are the numbers of these.

        If a GPU is in use, the copy is only enqueued, after everything else on its current stream.
        """
        if not self._has_room_for(tensors):
            self.fit(
                tuple(
                    TensorSpec(tensor.dtype, "cpu" if self.on_host else str(tensor.device), tuple(tensor.shape))
                    for tensor in tensors
                )
            )
            self._kinds = self._kinds_of(tensors)
        held, self.held = self.held, {}
        now = {number: (tensors[number], tensors[number]._version) for number in constants}
        known = {
            number
            for number, (tensor, version) in now.items()
            if number in held and held[number][0] is tensor and held[number][1] == version
        }
        views, copied = self.views, tensors
        if known:
            views = [view for number, view in enumerate(views) if number not in known]
            copied = [tensor for number, tensor in enumerate(tensors) if number not in known]
        if copied:
            with torch.no_grad():
                torch._foreach_copy_(views, copied, non_blocking=True)
        self.held = now
        return pending_copy(tensors)

    def _has_room_for(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the tensors are like those of the last call, the usual case. Making specs would take longer."""
        return self._kinds == self._kinds_of(tensors)

    def _kinds_of(self, tensors: list[torch.Tensor]) -> tuple[list[object], ...]:
        kinds = list(map(_dtype, tensors)), list(map(_shape, tensors))
        return kinds if self.on_host else (*kinds, list(map(_device, tensors)))


@dataclass(slots=True)
class Snapshot:
    """One copy of a state: the skeleton of the part that all ranks share, its tensors, and this rank's own part."""

    buffer: TensorBuffer = field(default_factory=TensorBuffer)
    skeleton: Tree = None
    own: object = None
    # The live objects from which its ``StateDict``s were taken, in order; None if the copy came from another rank.
    objects: list[Stateful] | None = None
    # The objects of which it is a copy, by their places, if they are known.
    places: Places | None = None
    # Gives these objects back the parts that they had then; None if ``objects`` is None.
    put_back: Callable[[], None] | None = None
    # Changes when other objects are kept, or their structure changes.
    outline: list[object] | None = None
    # The version of the templates for which ``put_back`` and ``outline`` were made.
    version: int | None = None
    # The changes of structure that a newcomer has to be told before it loads the copy.
    told: bytes | None = None
    # The last copy into this one, while a GPU may still be making it.
    pending: PendingCopy | None = None

    def take(
        self,
        shared: Mapping[str, object],
        own: object,
        keep: Keep = as_state_dict,
        remembered: Templates | None = None,
    ) -> None:
        """Copy a state in; a GPU may still be copying when this returns (see ``wait``).

        ``keep`` decides what is kept of objects with a state dict. An exception leaves this snapshot unusable, and the other one
        of its pair untouched.
        """
        found = Found()
        skeleton = flatten(shared, found, keep, remembered)
        self.pending = self.buffer.copy_from(found.tensors, found.constants)
        self.skeleton = skeleton
        self.objects = found.objects
        self.places = None
        self.own = own

    def wait(self) -> None:
        """Block until the last copy into this snapshot has ended."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def view(self, copies: bool = True) -> Tree:
        """Return the shared part as it was taken. Its tensors are the snapshot's own and must not be changed.

        With ``copies`` False, the same is true of all other objects.
        """
        return unflatten(self.skeleton, self.buffer.views, copies)

    def content(self) -> object:
        """Return a copy of the shared part as it was taken."""
        return cloned(self.view())


class SnapshotPair:
    """Two snapshots, one of which is current; ``spare`` is written, and ``switch`` makes it current once it is complete.

    One of them may be lent to a reader on another thread. Meanwhile a third snapshot takes its turn, so that no thread waits;
    it is created when first needed, and kept.
    """

    def __init__(self, current: Snapshot | None = None, on_host: bool = False) -> None:
        self._on_host = on_host
        self._current = current or self._new()
        self._spare = self._new()
        self._third: Snapshot | None = None
        self._lent: Snapshot | None = None
        self.is_empty = current is None

    @property
    def current(self) -> Snapshot:
        """The last commit."""
        assert not self.is_empty, "nothing has been saved yet"
        return self._current

    @property
    def spare(self) -> Snapshot:
        """Return the buffers that the next commit is written into."""
        if self._spare is self._lent:
            self._spare, self._third = self._third or self._new(), self._spare
        return self._spare

    def make_room(self, shared: Mapping[str, object], keep: Keep = as_state_dict) -> None:
        """Allocate and touch the memory of both snapshots in advance, because the system is slow to hand out new pages."""
        for snapshot in (self._current, self._spare):
            snapshot.take(shared, None, keep)
            snapshot.wait()

    def switch(self) -> None:
        """Make the snapshot that was written the current one."""
        self._spare.wait()
        self._current, self._spare = self._spare, self._current
        self.is_empty = False

    def lend(self) -> Snapshot:
        """Lend the current snapshot for reading. It does not change until ``take_back``, which any thread may call."""
        assert self._lent is None, "only one snapshot is lent at a time"
        self._lent = self.current
        return self._lent

    def take_back(self) -> None:
        """End the loan."""
        self._lent = None

    def _new(self) -> Snapshot:
        return Snapshot(TensorBuffer(self._on_host))
