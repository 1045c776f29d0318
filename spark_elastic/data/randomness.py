"""The random number generators of a process: Python's, NumPy's, and torch's on the CPU and on each GPU."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from spark_elastic._code import globals_of

# The states of Python's and NumPy's generators, in their own formats, then torch's on the CPU and on each GPU.
RandomStates = tuple[Any, Any, torch.Tensor, list[torch.Tensor] | None]


def random_states() -> RandomStates:
    """Return the states of all generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def digest_of_random_states(own: Sequence[object] = ()) -> bytes:
    """Return a number that changes whenever any of the generators, or of others that ``own_generators`` found, is drawn from."""
    python, numeric, cpu, cuda = random_states()
    digest = hashlib.blake2b(repr((python, numeric[2:])).encode())
    for state in (numeric[1], cpu.numpy(), *(each.cpu().numpy() for each in cuda or ())):
        digest.update(state.tobytes())
    digest.update(b"".join(map(_state_of, own)))
    return digest.digest()


def set_random_states(states: RandomStates) -> None:
    """Set all generators to states that ``random_states`` returned."""
    python, numeric, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numeric)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


def seed_all(numbers: Sequence[int]) -> None:
    """Seed all generators from non-negative integers, such as a seed, an epoch and a row number."""
    # NumPy's SeedSequence would take longer than all the seeding below.
    python, numeric, seed = struct.unpack(
        "<QIQ", hashlib.blake2b(repr([*map(int, numbers)]).encode(), digest_size=20).digest()
    )
    random.seed(python)
    np.random.seed(numeric)
    # torch.manual_seed takes a millisecond, because it formats the stack for each kind of device that is not initialized yet.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_own(generators: Sequence[object], numbers: Sequence[int]) -> None:
    """Seed generators that ``own_generators`` has found from non-negative integers, each by its place among them."""
    for place, generator in enumerate(generators):
        text = repr([*map(int, numbers), place]).encode()
        (seed,) = struct.unpack("<I", hashlib.blake2b(text, digest_size=4).digest())
        if isinstance(generator, np.random.Generator):
            kind: Any = type(generator.bit_generator)
            generator.bit_generator.state = kind(seed).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, (random.Random, np.random.RandomState)):
            generator.seed(seed)


def _state_of(generator: object) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state).encode()
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False)).encode()
    assert isinstance(generator, random.Random)
    return repr(generator.getstate()).encode()


# At how many objects a search for generators looks at most, and at how many entries of each container: items may be many.
_LOOKED_AT, _ENTRIES = 10_000, 100
# The classes of generators that code may have of its own.
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# The generators that ``seed_all`` seeds. Functions such as ``random.random`` are methods of these.
_METHODS: tuple[Any, ...] = (random.random, np.random.random)
_SEEDED = (*(method.__self__ for method in _METHODS), torch.default_generator)
_CLOSED = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, np.generic, ModuleType, type)


def is_seeded(generator: object) -> bool:
    """Whether a generator is one of those that ``seed_all`` seeds."""
    return any(generator is each for each in (*_SEEDED, *torch.cuda.default_generators))


def own_generators(*roots: object, kinds: tuple[type, ...] = GENERATORS) -> list[object]:
    """Find the generators that objects use: in attributes, lists, dicts, closures, partial functions, and global variables.

    kinds: the classes of the generators that are looked for.
    """
    found: list[object] = []
    known: dict[int, object] = {}
    waiting = deque(roots)
    while waiting and len(known) < _LOOKED_AT:
        value = waiting.popleft()
        if value is None or id(value) in known:
            continue
        known[id(value)] = value  # kept alive, so that no other object gets its id
        with contextlib.suppress(Exception):  # proxies may raise whatever is asked of them
            if isinstance(value, _CLOSED):
                continue
            if not isinstance(value, kinds):
                waiting.extend(_used_by(value, kinds))
            elif not isinstance(value, random.SystemRandom) and not is_seeded(value):
                found.append(value)
    return found


def _used_by(value: object, kinds: tuple[type, ...]) -> Iterable[object]:
    if isinstance(value, (list, tuple, deque)):
        return islice(value, _ENTRIES)
    if isinstance(value, dict):
        return islice(list(value.values()), _ENTRIES)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, (MethodType, BuiltinMethodType)):
        return value.__self__, getattr(value, "__func__", None)
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        named = (value.__globals__.get(name) for name in globals_of(value.__code__))
        used = [each for each in named if isinstance(each, (*kinds, FunctionType))]
        return *cells, *used, value.__defaults__, value.__kwdefaults__
    kind = type(value)
    methods = (getattr(kind, name, None) for name in ("__getitem__", "__call__", "forward"))
    held = [each for each in vars(kind).values() if isinstance(each, kinds)]
    return (
        *getattr(value, "__dict__", {}).values(),
        *held,
        *(each for each in methods if isinstance(each, FunctionType)),
    )


def _content(cell: CellType) -> object:
    """Return what a cell of a closure holds; None if its variable was deleted or has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
