"""Finds attributes of a State's own modules and optimizers that training carries on and no commit keeps.

A commit has of such an object what is in its state dict, which is not asked for here: it may be large, or a collective. What
else changes from step to step goes on from wherever it is after a reset, and starts over on a newcomer. Most attributes that
change are harmless, because each step sets them anew, such as the last loss or attention map. So only these count, also in
containers, and only if they change between all looks: whole numbers that grow by the same each time, tensors that change in
place, and random number generators.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy
import torch

from spark_elastic.worker.checks.live_memory import address_of, live_tensors
from spark_elastic.worker.checks.plain_values import state_of_generator
from spark_elastic.worker.checks.unsupported import why_unsupported
from spark_elastic.worker.module_registers import same_values
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer, is_part
from spark_elastic.worker.state.snapshot import find_objects, leaves

# The steps of an optimizer in a generation at which all objects are looked at: those of each optimizer, because one object may
# only change along with it. Those of further optimizers are not counted.
STEPS = (2, 3, 4, 5)
OPTIMIZERS = 4
# As many entries of a container, and elements of a tensor, are compared.
ENTRIES = 100
PIECE = 1000
# How deep containers are searched.
DEPTH = 2
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque)
# As many attributes are named.
NAMED = 3
# Where modules and optimizers keep what state dicts have.
_REGISTERS = {"_parameters", "_buffers", "_modules", "state", "param_groups"}
# What a class defines that chooses itself what is in its state dict.
_OWN_STATE = ("state_dict", "get_extra_state", "_save_to_state_dict")
# The packages of the classes that the user's may derive from. Others have attributes for purposes of their own.
_BASES = {"abc", "builtins", "torch", "typing"}
# The packages whose objects are none of the user's.
_LIBRARIES = {
    *("accelerate", "keras", "lightning", "lightning_fabric", "peft", "pyspark", "pytorch_lightning", "spark_elastic"),
    *("torchao", "torchdata", "torchmetrics", "torchvision", "transformers"),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What an attribute, or an entry of it, was at a look."""

    place: str
    owner: torch.nn.Module | torch.optim.Optimizer
    # The containers that lead to it, and the object itself unless it is a number. These stay the same objects.
    held: tuple[object, ...]
    value: int | bytes | torch.Tensor
    # By how much a number has grown since the last look.
    growth: int | None = None


class UnkeptAttributes:
    """Compares the attributes of a State's objects at the first steps of each optimizer in a generation."""

    def __init__(self) -> None:
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, dict[str, Seen]]]
        self._looks = weakref.WeakKeyDictionary()
        self._told: set[str] = set()

    def begin(self) -> None:
        """Begin a generation."""
        self._looks.clear()

    def look(
        self,
        optimizer: torch.optim.Optimizer,
        shared: Callable[[], Mapping[str, object]],
        local: Callable[[], Mapping[str, object]],
    ) -> list[str]:
        """Note the attributes before an optimizer's step. At the last look, describe those that changed between all of them.

        ``shared`` and ``local`` return the values of the State. Modules and optimizers are told of once each.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return []
        step, before = self._looks.get(optimizer, (0, {}))
        if step >= STEPS[-1] or (step == 0 and len(self._looks) >= OPTIMIZERS):
            return []
        step += 1
        changing: dict[str, Seen] = {}
        if step == STEPS[0]:
            changing = _attributes(shared())
        elif before:
            changing = dict(_changed(before, _attributes(shared())))
        is_last = step == STEPS[-1]
        self._looks[optimizer] = step, {} if is_last else changing
        if not is_last or not changing:
            return []
        texts = _told_of(_unkept(changing, (shared(), local())))
        news = [text for advice, text in texts.items() if advice not in self._told]
        self._told.update(texts)
        return news


def _told_of(unkept: Mapping[str, torch.nn.Module | torch.optim.Optimizer]) -> dict[str, str]:
    """Return what to tell, by the advice. unkept: the owners of attributes, by the attributes' places."""
    texts: dict[str, str] = {}
    for advice in dict.fromkeys(map(_advice, unkept.values())):
        places = [place for place, owner in unkept.items() if _advice(owner) == advice]
        what = f"attributes {', '.join(places[:NAMED])} change" if places[1:] else f"attribute {places[0]} changes"
        texts[advice] = (
            f"the {what} while it trains, and commits leave out what is not in a state_dict: after a loss it would go on from "
            f"another value, and a newcomer from the first one. {advice}, or keep it in the State, unless the training does not "
            "depend on it"
        )
    return texts


def _advice(owner: torch.nn.Module | torch.optim.Optimizer) -> str:
    if isinstance(owner, torch.nn.Module):
        return "Make it a buffer (register_buffer), let get_extra_state return it"
    if is_part(owner):
        return "Keep it in the state of each parameter (optimizer.state[parameter])"
    return "Keep it in the optimizer's state or param_groups, let its state_dict and load_state_dict include it"


# ---------------------------------------------------------------- what there is


def _attributes(shared: Mapping[str, object]) -> dict[str, Seen]:
    """Return what may be carried on in the attributes of the modules and optimizers of a State, by place."""
    found: dict[str, Seen] = {}
    for place, root in find_objects(shared).items():
        for part, owner in _parts(root):
            for name, value in list(vars(owner).items()) if _is_own(owner) and not _chooses(root) else ():
                where = ".".join(filter(None, ("state", place, part, name)))
                for key, held, seen in _values(value) if name not in _REGISTERS else ():
                    found[where + key] = Seen(where, owner, held, seen)
    return found


def _parts(root: object) -> Iterator[tuple[str, torch.nn.Module | torch.optim.Optimizer]]:
    if isinstance(root, torch.nn.Module):
        yield from root.named_modules()
    elif isinstance(root, torch.optim.Optimizer):
        yield "", root.inner if isinstance(root, ZeroRedundancyOptimizer) else root


def _is_own(owner: object) -> bool:
    """Whether an object is of a class of the user's, whose attributes are the user's, and leaves its state dict to torch."""
    packages = {kind.__module__.partition(".")[0] for kind in type(owner).__mro__}
    return bool(packages - _BASES) and not packages & _LIBRARIES and not _chooses(owner)


def _chooses(owner: object) -> bool:
    kinds = [kind for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] not in _BASES | _LIBRARIES]
    return any(name in vars(kind) for kind in kinds for name in _OWN_STATE)


def _values(
    entry: object, held: tuple[object, ...] = ()
) -> Iterator[tuple[str, tuple[object, ...], int | bytes | torch.Tensor]]:
    """Yield the values in an attribute that may be carried on, each with its place there and with what leads to it."""
    if isinstance(entry, (int, numpy.integer)) and not isinstance(entry, bool):
        yield "", held, int(entry)
    elif isinstance(entry, torch.Tensor):
        if _is_comparable(entry):
            yield "", (*held, entry), entry.detach().reshape(-1)[:PIECE].clone()
    elif (state := state_of_generator(entry)) is not None:
        yield "", (*held, entry), state
    elif isinstance(entry, (dict, list, tuple, deque)) and type(entry) in _CONTAINERS and len(held) < DEPTH:
        entries = entry.values() if isinstance(entry, dict) else entry
        for place, each in enumerate(list(itertools.islice(entries, ENTRIES))):
            for key, through, value in _values(each, (*held, entry)):
                yield f"[{place}]{key}", through, value


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one without gradients, the first elements of which are had without a copy of it."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and why_unsupported(tensor) is None
    return is_plain and not tensor.requires_grad and tensor.is_contiguous()


# ---------------------------------------------------------------- what changes


def _changed(before: Mapping[str, Seen], now: Mapping[str, Seen]) -> Iterator[tuple[str, Seen]]:
    """Yield what differs from before, at the same place and in the same objects."""
    for key, new in now.items():
        old = before.get(key)
        if old is None or list(map(id, old.held)) != list(map(id, new.held)):
            continue
        if isinstance(new.value, int) and isinstance(old.value, int):
            growth = new.value - old.value
            if growth and old.growth in (None, growth):
                yield key, replace(new, growth=growth)
        elif isinstance(new.value, torch.Tensor) and isinstance(old.value, torch.Tensor):
            if new.value.shape != old.value.shape or not same_values(old.value, new.value):
                yield key, new
        elif new.value != old.value:
            yield key, new


# ---------------------------------------------------------------- what is kept


def _unkept(
    changing: Mapping[str, Seen], trees: tuple[Mapping[str, object], ...]
) -> dict[str, torch.nn.Module | torch.optim.Optimizer]:
    """Return the owners of attributes of which the State itself has no part, by their places."""
    values = [value for tree in trees for value in (*tree.values(), *(each for _, each in leaves(tree)))]
    known = set(map(id, values))
    memory = {address_of(tensor) for value in values for tensor in _kept_tensors(value)}

    def is_known(value: object) -> bool:
        return id(value) in known or (isinstance(value, torch.Tensor) and address_of(value) in memory)

    return {seen.place: seen.owner for seen in changing.values() if not any(map(is_known, seen.held))}


def _kept_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that are kept with a value, and the gradients, which each step sets anew."""
    if isinstance(value, torch.Tensor):
        yield value
    for _, tensor in live_tensors(value):
        yield from (each for each in (tensor, tensor.grad) if each is not None)
