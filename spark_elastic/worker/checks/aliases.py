"""Finds memory that a State has twice, in itself and in an object that is copied as a whole: a reset makes it two."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.live_memory import address_of, live_tensors, memory_in
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.state.snapshot import find_objects, has_state_dict

# Types that user code changes in place, and that a State takes apart. Other objects that an object of the State holds besides
# stay one.
_TAKEN_APART = (list, dict, OrderedDict, torch.Tensor)


def check_aliases(objects: Mapping[str, object]) -> None:
    """Warn of a list, a dict or a tensor that an object of the State holds besides.

    Raises ``ValueError`` for a container that contains itself.
    """
    places: dict[int, str] = {}
    # What objects hold, with its place.
    held: dict[int, tuple[object, str]] = {}
    above: set[int] = set()

    def look(value: object, place: str) -> None:
        if id(value) in above:
            raise ValueError(
                f"state.{place} is a {type(value).__name__} that contains itself, which a State cannot copy"
            )
        if type(value) in _TAKEN_APART:
            places.setdefault(id(value), place)
        above.add(id(value))
        for name, entry in _entries(value):
            if type(entry) not in PLAIN:
                look(entry, f"{place}[{name!r}]")
        above.discard(id(value))
        for name, entry in _attributes(value):
            held[id(entry)] = entry, f"{place}.{name}"

    for name, value in objects.items():
        look(value, name)
    for number, (value, place) in held.items():
        if number in places:
            warnings.warn(
                f"state.{places[number]} and state.{place} are the same {type(value).__name__}, and a State keeps each by value: "
                "on other ranks, and after a reset, they are two, and what is put into one is not in the other. Give it to the "
                "State once",
                stacklevel=depth_of_user(),
            )


def _entries(value: object) -> Iterable[tuple[object, object]]:
    if type(value) in (dict, OrderedDict):
        assert isinstance(value, dict)
        return value.items()
    # A subclass, such as a namedtuple, is copied as a whole.
    return enumerate(value) if isinstance(value, (list, tuple)) and type(value) in (list, tuple) else ()


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return those attributes of an object copied as a whole that a State would take apart if they were its own."""
    if isinstance(value, (type, *_TAKEN_APART)) or has_state_dict(value):
        return []
    return [(name, entry) for name, entry in getattr(value, "__dict__", {}).items() if type(entry) in _TAKEN_APART]


_KEPT_BY_TORCH = "optimizer.load_state_dict(copy.deepcopy(…)), since torch trains on in the tensors that it is given"


def check_live(name: str, value: object, attributes: Mapping[str, object]) -> bool:
    """Raise ``TrainingCodeError`` if a tensor in ``value`` shares its memory with a module or optimizer among the attributes.

    Return whether there are tensors in it.
    """
    held = {address: place for address, place in memory_in(value, f"state.{name}") if address}
    if not held:
        return False
    public = {name: entry for name, entry in attributes.items() if not name.startswith("_")}
    for owner, live in find_objects(public).items():
        for part, tensor in live_tensors(live):
            if address_of(tensor) in held:
                raise TrainingCodeError(
                    f"{held[address_of(tensor)]} shares its memory with {part} of state.{owner}, as in module.state_dict(): it "
                    "changes with every step, and is a copy on other ranks and after a reset. Copy it first: "
                    f"state.{name} = copy.deepcopy(…)"
                    + (f", and {_KEPT_BY_TORCH}" if isinstance(live, torch.optim.Optimizer) else "")
                )
    return True


# The State that each optimizer belongs to.
_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[object]] = weakref.WeakKeyDictionary()


def watch_loads(optimizer: torch.optim.Optimizer, state: object) -> None:
    """Make ``optimizer.load_state_dict`` run ``check_live`` with all attributes of its State."""
    if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        return  # a wrapper of another optimizer, which is torch's in name only
    if optimizer not in _states:
        optimizer.register_load_state_dict_post_hook(_check_loaded)
    _states[optimizer] = weakref.ref(state)


def _check_loaded(optimizer: torch.optim.Optimizer) -> None:
    state = _states[optimizer]() if optimizer in _states else None
    public = {} if state is None else {name: value for name, value in vars(state).items() if not name.startswith("_")}
    owners = {name: live for name, live in find_objects(public).items() if live is optimizer}
    for name, value in public.items() if owners else ():
        if type(value) not in PLAIN:
            check_live(name, value, owners)
