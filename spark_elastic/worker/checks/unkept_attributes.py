"""Finds attributes of a State's modules, optimizers and other objects that training carries on and no commit keeps.

A commit has of such an object what is in its state dict. What else changes from step to step goes on from wherever it is after a
reset, and starts over on a newcomer. Most attributes that change are harmless, because each step sets them anew, such as the
last attention map. So only these count, and only if they change between all looks:

- a number, or a tensor that is replaced, if code of the object reads the attribute before it sets it (``self.calls += 1``);
- a whole number in a container, if it grows each time by the same;
- a tensor that changes in place, and a random number generator, also in containers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from spark_elastic.worker.checks.carried_attributes import carried_names, own_classes
from spark_elastic.worker.checks.live_memory import address_of, live_tensors
from spark_elastic.worker.checks.plain_values import state_of_generator
from spark_elastic.worker.checks.unsupported import metrics_in, why_unsupported
from spark_elastic.worker.module_registers import same_values
from spark_elastic.worker.state.snapshot import Stateful, find_objects, leaves

# The steps of an optimizer in a generation at which all objects are looked at: those of each optimizer, because one object may
# only change along with it. Those of further optimizers are not counted.
STEPS = (2, 3, 4, 5)
OPTIMIZERS = 4
# As many entries of a container, and elements of a tensor, are compared. Larger tensors are left alone if that needs a copy.
ENTRIES = 100
PIECE = 1000
NUMBERS = 1_000_000
# How deep containers are searched.
DEPTH = 2
# As many attributes are named.
NAMED = 3
# Where modules and optimizers keep what state dicts have.
_REGISTERS = {
    torch.nn.Module: ("_parameters", "_buffers", "_modules"),
    torch.optim.Optimizer: ("state", "param_groups"),
}
# What a class defines that adds to a state dict.
_OWN_STATE = ("state_dict", "get_extra_state", "_save_to_state_dict")

_Value = int | float | bytes | torch.Tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """What an attribute, or an entry of it, was at a look."""

    place: str
    owner: object
    root: Stateful
    name: str
    # The containers that lead to it, and the object itself if it has to change in place.
    held: tuple[object, ...]
    value: _Value
    # By how much a whole number has grown since the last look.
    growth: int | None = None


class UnkeptAttributes:
    """Compares the attributes of a State's objects at the first steps of each optimizer in a generation."""

    def __init__(self) -> None:
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, dict[str, Seen]]]
        self._looks = weakref.WeakKeyDictionary()
        self._told: set[str] = set()
        # The optimizer that is stepping. Torch's hooks see the step of a subclass again when that calls its base class's.
        self._stepping: int | None = None

    def begin(self) -> None:
        """Begin a generation."""
        self._looks.clear()
        self._stepping = None

    def after_step(self) -> None:
        """Note that an optimizer's step is over."""
        self._stepping = None

    def look(
        self,
        optimizer: torch.optim.Optimizer,
        shared: Callable[[], Mapping[str, object]],
        local: Callable[[], Mapping[str, object]],
    ) -> list[str]:
        """Note the attributes before an optimizer's step. At the last look, describe those that changed between all of them.

        ``shared`` and ``local`` return the values of the State. Modules, and other objects, are told of once.
        """
        is_within, self._stepping = self._stepping == id(optimizer), id(optimizer)
        step, before = self._looks.get(optimizer, (0, {}))
        if is_within or step >= STEPS[-1] or (step == 0 and len(self._looks) >= OPTIMIZERS):
            return []
        step += 1
        changing: dict[str, Seen] = {}
        if step == STEPS[0] or before:
            now = _attributes(shared())
            changing = now if step == STEPS[0] else dict(_changed(before, now))
        is_last = step == STEPS[-1]
        self._looks[optimizer] = step, {} if is_last else changing
        texts = _told_of(_unkept(changing, shared(), local())) if is_last and changing else {}
        news = [text for kind, text in texts.items() if kind not in self._told]
        self._told.update(texts)
        return news


def _told_of(unkept: Mapping[str, Seen]) -> dict[str, str]:
    """Return what to tell of modules and of other objects."""
    texts: dict[str, str] = {}
    for advice in dict.fromkeys(map(_advice, unkept.values())):
        places = [place for place, seen in unkept.items() if _advice(seen) == advice]
        what = f"attributes {', '.join(places[:NAMED])} change" if places[1:] else f"attribute {places[0]} changes"
        texts[advice] = (
            f"the {what} while it trains, and commits leave out what is not in a state_dict: after a loss it would go on from "
            f"another value, and a newcomer from the first one. {advice}, unless the training does not depend on it"
        )
    return texts


def _advice(seen: Seen) -> str:
    if isinstance(seen.owner, torch.nn.Module):
        return "Make it a buffer (register_buffer), let get_extra_state return it, or keep it in the State"
    if isinstance(seen.owner, torch.optim.Optimizer):
        return (
            "Keep it in the optimizer's state or param_groups, let its state_dict and load_state_dict include it, or keep it in "
            "the State"
        )
    return f"Let state_dict and load_state_dict of {type(seen.owner).__name__} include it, or keep it in the State"


# ---------------------------------------------------------------- what there is


def _attributes(shared: Mapping[str, object]) -> dict[str, Seen]:
    """Return what may be carried on in the attributes of the objects of a State, by place."""
    found: dict[str, Seen] = {}
    for place, root in find_objects(shared).items():
        for part, owner in root.named_modules() if isinstance(root, torch.nn.Module) else [("", root)]:
            # An iterable with a position is a loader, and metrics have a check of their own.
            if metrics_in(owner) or (hasattr(type(owner), "__iter__") and not isinstance(owner, torch.nn.Module)):
                continue
            carried = carried_names(owner)
            kept = {name for kind, names in _REGISTERS.items() if isinstance(owner, kind) for name in names}
            attributes = getattr(owner, "__dict__", {})
            # What others do to the attributes of a library's object is their own affair, as with those of a module in its hooks.
            for name in list(attributes) if own_classes(owner) else carried & attributes.keys():
                where = ".".join(filter(None, ("state", place, part, name)))
                for key, held, value in _values(attributes[name], (), name in carried) if name not in kept else ():
                    found[where + key] = Seen(where, owner, root, name, held, value)
    return found


def _values(entry: Any, held: tuple[object, ...], is_carried: bool) -> Iterator[tuple[str, tuple[object, ...], _Value]]:
    """Yield the values in an attribute that may be carried on, with what leads to them."""
    if isinstance(entry, (int, float, numpy.integer, numpy.floating)) and not isinstance(entry, bool):
        if is_carried or held:
            yield "", held, entry.item() if isinstance(entry, numpy.generic) else entry
    elif isinstance(entry, torch.Tensor):
        if type(entry) in (torch.Tensor, torch.nn.Parameter) and _is_comparable(entry):
            yield (
                "",
                held if is_carried else (*held, entry),
                entry.detach().reshape(-1)[:PIECE].to(torch.float64, copy=True),
            )
    elif (state := state_of_generator(entry)) is not None:
        yield "", (*held, entry), state
    elif isinstance(entry, (dict, list, tuple, deque)) and len(held) < DEPTH:
        entries = list(entry.values() if isinstance(entry, dict) else entry)
        for place, each in enumerate(entries[:ENTRIES]):
            for key, through, value in _values(each, (*held, entry), is_carried=False):
                yield f"[{place}]{key}", through, value


def _is_comparable(tensor: torch.Tensor) -> bool:
    if tensor.requires_grad or why_unsupported(tensor) is not None or tensor.is_complex():
        return False
    return tensor.numel() <= NUMBERS or tensor.is_contiguous()


# ---------------------------------------------------------------- what changes


def _changed(before: Mapping[str, Seen], now: Mapping[str, Seen]) -> Iterator[tuple[str, Seen]]:
    """Yield what differs from before, at the same place and in the same objects."""
    for key, new in now.items():
        old = before.get(key)
        if old is None or list(map(id, old.held)) != list(map(id, new.held)):
            continue
        if isinstance(new.value, int) and isinstance(old.value, int):
            growth = new.value - old.value
            if (growth if not new.held else growth > 0) and old.growth in (None, growth):
                yield key, Seen(new.place, new.owner, new.root, new.name, new.held, new.value, growth)
        elif isinstance(new.value, torch.Tensor):
            if _has_changed(old.value, new.value):
                yield key, new
        elif new.value != old.value and not (new.held and isinstance(new.value, float)):
            yield key, new


def _has_changed(old: _Value, new: torch.Tensor) -> bool:
    return (
        isinstance(old, torch.Tensor)
        and (old.shape, old.device) == (new.shape, new.device)
        and not same_values(old, new)
    )


# ---------------------------------------------------------------- what is kept


def _unkept(changing: Mapping[str, Seen], shared: Mapping[str, object], local: Mapping[str, object]) -> dict[str, Seen]:
    """Return those of which neither a state dict nor the State itself has a part, by their attributes."""
    values = [value for tree in (shared, local) for value in (*tree.values(), *(each for _, each in leaves(tree)))]
    known = set(map(id, values))
    memory = {address_of(tensor) for value in values for tensor in _kept_tensors(value)}
    found: dict[str, Seen] = {}
    for seen in changing.values():
        objects = (*seen.held, getattr(seen.owner, seen.name, None))
        is_known = any(
            id(each) in known or (isinstance(each, torch.Tensor) and address_of(each) in memory) for each in objects
        )
        if seen.place not in found and not is_known and not _is_in_state_dict(seen):
            found[seen.place] = seen
    return found


def _kept_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that are kept with a value, and the gradients, which each step sets anew."""
    if isinstance(value, torch.Tensor):
        yield value
    for _, tensor in live_tensors(value):
        yield from (each for each in (tensor, tensor.grad) if each is not None)


def _is_in_state_dict(seen: Seen) -> bool:
    """Whether a state dict has the attribute by its name or, if the user's code adds to it, has its value."""
    content = seen.root.state_dict()
    names = {str(name).rpartition(".")[2].strip("_") for name in (content if isinstance(content, Mapping) else ())}
    if seen.name.strip("_") in names:
        return True
    parts = seen.root.modules() if isinstance(seen.root, torch.nn.Module) else [seen.root]
    if not any(name in vars(kind) for part in parts for kind in own_classes(part) for name in _OWN_STATE):
        return False
    return any(name == seen.name.strip("_") or _is_equal(seen.value, value) for name, value in _entries(content))


def _entries(content: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield what is in nested containers, with the name of each."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _entries(value, str(key).strip("_"))
    elif isinstance(content, (list, tuple, deque)):
        for value in content if name != "params" else ():  # the numbers of parameters say nothing
            yield from _entries(value, name)
    yield name, content


def _is_equal(value: _Value, kept: object) -> bool:
    if isinstance(kept, torch.Tensor) and (why_unsupported(kept) is not None or kept.is_complex()):
        return False
    if isinstance(value, bytes):
        state = bytes(kept.flatten().tolist()) if isinstance(kept, torch.Tensor) and kept.dtype is torch.uint8 else None
        return value in (state, repr(kept).encode())
    if isinstance(value, torch.Tensor):
        piece = kept.detach().reshape(-1)[:PIECE].to(value) if isinstance(kept, torch.Tensor) else None
        return piece is not None and piece.shape == value.shape and same_values(piece, value)
    number = kept.item() if isinstance(kept, torch.Tensor) and kept.numel() == 1 else kept
    return isinstance(number, (int, float)) and number == value
