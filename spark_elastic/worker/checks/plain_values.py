"""Plain values: ranks compare the numbers, texts and other tensors of a State, which are meant to be equal on all of them.

A value that each rank computes from its own rows, such as ``state.best = min(state.best, loss.item())``, changes in a reset: all
ranks get that of one rank, and a checkpoint holds rank 0's. Nothing breaks at once, so this is a warning. It names the
attribute, the values of two ranks, and what to write instead.

The values are compared at the same commits as fingerprints are (see ``fingerprint.py``), also the first of each generation:
their digest travels with the control collective, and only if digests differ do ranks exchange the values. The sync of a reset
compares them as well (``find_unequal``), and makes them equal. Plain values,
containers, arrays and tensors are compared, also those in objects' state dicts or attributes. Modules, optimizers and loaders
are compared elsewhere, and ``local=`` is never compared.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import numpy
import torch

from spark_elastic._text import as_utf8
from spark_elastic.checkpoint.skeleton import is_plain
from spark_elastic.worker.checks.fingerprint import PIECE, TOLERANCE, digest_of_bits, machine_kind
from spark_elastic.worker.checks.reachable import DEPTH, LENGTH
from spark_elastic.worker.checks.user_frames import depth_of_user

if TYPE_CHECKING:
    from spark_elastic.worker.world import World

# At most this many values are compared, the first ones that are found.
MOST = 1000
# Longer texts are shown by their beginning and compared by a digest.
LONG = 80

Value = bool | int | float | str | None


class Values(msgspec.Struct, frozen=True):
    """What ranks compare, by the names of the places in the State: plain values, and digests of tensors and arrays."""

    plain: dict[str, Value]
    tensors: dict[str, str]

    @property
    def digest(self) -> int:
        """A positive number that is equal for equal values."""
        return 1 + int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=7).digest(), "big")


# The decoder is made once, here, because msgspec must not inspect a type for the first time on two threads at once.
_shown = msgspec.msgpack.Decoder(tuple[int, str, Values])


def take_values(tree: Mapping[str, object]) -> Values:
    """Take the values to compare from the attributes of a State. Waits for a GPU that holds tensors among them."""
    plain: dict[str, Value] = {}
    tensors: dict[str, str] = {}

    def look(value: object, place: str, depth: int) -> None:
        if depth > DEPTH or len(plain) + len(tensors) >= MOST:
            return
        if isinstance(value, numpy.generic) and not isinstance(value, float):
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            plain[place] = _short(value)
        elif isinstance(value, (torch.Tensor, numpy.ndarray)):
            described = _describe(value)
            if described:
                tensors[place] = described
        elif (state := state_of_generator(value)) is not None:
            plain[place] = f"a {type(value).__name__} in the state {_digest(state)}"
        elif isinstance(value, (set, frozenset)):
            if all(map(is_plain, value)):
                plain[place] = _short(str(sorted(map(repr, value))))
        else:
            for name, entry in _parts(value):
                look(entry, f"{place}{name}", depth + 1)

    for name, value in tree.items():
        look(value, name, 0)
    return Values(plain, tensors)


def _describe(value: torch.Tensor | numpy.ndarray) -> str:
    """Return a text that is equal for equal tensors; empty for tensors that train, which are compared like parameters."""
    if isinstance(value, torch.Tensor):
        return "" if value.requires_grad else f"{value.dtype} {list(value.shape)} {digest_of_bits(value)}"
    if value.dtype.hasobject:
        return ""
    return f"{value.dtype} {list(value.shape)} {_digest(numpy.ascontiguousarray(value.reshape(-1)[:PIECE]).tobytes())}"


def state_of_generator(value: object) -> bytes | None:
    """Return the state of a random number generator; None for anything else."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return repr(value.getstate()).encode()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    return None


def _parts(value: object) -> list[tuple[str, object]]:
    """Return the parts of a container or an object, and how each part is reached from it."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", entry) for key, entry in value.items() if is_plain(key)] if len(value) <= LENGTH else []
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{place}]", entry) for place, entry in enumerate(value)] if len(value) <= LENGTH else []
    kind = type(value)
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, type, ModuleType)) or hasattr(kind, "__iter__"):
        return []  # an iterable with a position is a loader
    if kind.__module__.partition(".")[0] == "spark_elastic":
        return []
    state = getattr(value, "state_dict", None)
    content = state() if callable(state) else getattr(value, "__dict__", None)
    if not isinstance(content, dict) or len(content) > LENGTH:
        return []
    return [(f".{key}", entry) for key, entry in content.items() if is_plain(key)]


def _short(value: Value) -> Value:
    """Return the value, or a text in its place where it is too long or too large to be sent."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    text = as_utf8(str(value))
    return text if len(text) <= LONG else f"{text[:LONG]}… ({len(text)} characters, {_digest(text.encode())})"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def find_differences(everybody: Sequence[Values], is_exact: bool) -> dict[str, str]:
    """Describe the first difference in each attribute that is not equal on all ranks. Pure; in rank order.

    ``is_exact``: ranks compute the same bits. If not, numbers that are near each other count as equal, and tensors are left out.
    """
    first, found = everybody[0], dict[str, str]()
    for rank, other in enumerate(everybody):
        for place in (*first.plain, *(place for place in other.plain if place not in first.plain)):
            if (place in first.plain) != (place in other.plain):
                have, lacks = (0, rank) if place in first.plain else (rank, 0)
                text = f"state.{place} is there on rank {have} and not on rank {lacks}"
            elif not _is_equal(first.plain[place], other.plain[place], is_exact):
                text = f"state.{place} is {first.plain[place]!r} on rank 0 and {other.plain[place]!r} on rank {rank}"
            else:
                continue
            found.setdefault(_attribute(place), text)
        for place in first.tensors if is_exact else ():
            if place in other.tensors and first.tensors[place] != other.tensors[place]:
                found.setdefault(_attribute(place), f"state.{place} has other elements on rank {rank} than on rank 0")
    return found


def _is_equal(one: Value, other: Value, is_exact: bool) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        near = not is_exact and abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
        return one == other or near or (one != one and other != other)
    return one == other


def _attribute(place: str) -> str:
    return place.partition("[")[0].partition(".")[0]


def find_unequal(world: World, attributes: Mapping[str, object], number: int) -> list[str]:
    """Return the names of attributes whose values differ between the ranks of a world, the same on all of them.

    All ranks call this, and wait for each other. ``number`` is new in this world. Raises ``WorkerLostError``.
    """
    if world.size == 1:
        return []
    values = take_values(attributes)
    return [] if len(set(world.gather(values.digest))) == 1 else [*_compare(world, f"values of sync {number}", values)]


def _compare(world: World, key: str, mine: Values) -> dict[str, str]:
    """Exchange the values of all ranks, and describe the differences by attribute. ``key`` is new in this world."""
    packed = msgspec.msgpack.encode((world.rank, machine_kind(world.group.runs_ahead), mine))
    shown = sorted(map(_shown.decode, world.store.gather(key, packed, world.size)), key=lambda each: each[0])
    kinds = {kind for _, kind, _ in shown}
    return find_differences([each for _, _, each in shown], len(kinds) == 1 and kinds != {""})


class PlainValues:
    """Compares this rank's values with those of the others; warns once per attribute. Used by the thread that commits."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def begin(self, world: World) -> None:
        """Begin a generation."""
        self._world = world
        self._mine: tuple[int, Values] | None = None
        # Attributes that are known to differ. All ranks leave these out from then on.
        self._told: set[str] = set()

    def report(self, index: int, attributes: Mapping[str, object]) -> int:
        """Return this rank's digest for the commit of this index; 0 if there is no rank to compare with."""
        if self._world.size == 1:
            return 0
        values = take_values({name: value for name, value in attributes.items() if name not in self._told})
        self._mine = index, values
        return values.digest

    def read(self, digests: Sequence[int]) -> None:
        """Compare the digests of all ranks. If they differ, wait until all ranks have sent their values."""
        mine, self._mine = self._mine, None
        if mine is None or len(set(digests)) == 1:
            return
        index, values = mine
        for name, text in _compare(self._world, f"values/{index}", values).items():
            self._told.add(name)
            if self._world.rank == 0 and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"{text}. What is in a State is meant to be equal on all ranks: a reset gives all ranks that of one rank, "
                    f"and checkpoints have that of rank 0. Reduce it over all ranks before it is put "
                    f"there, as in state.{name} = se.allreduce(torch.tensor(value)).item(), or keep what is each rank's own in "
                    f'se.TorchState(local={{"{name}": …}})',
                    stacklevel=depth_of_user(),
                )
