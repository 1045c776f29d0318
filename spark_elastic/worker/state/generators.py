"""The random number generators of a process, whose states a commit keeps, and with which a newcomer begins.

Asking NumPy and Python for the states of their generators takes longer than everything else that a small commit does in Python,
and in most steps nothing draws numbers from them. Therefore a generator's memory is compared with its content at the last
commit, and the generator is asked for its state only if the two differ.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from spark_elastic.data.randomness import RandomStates
from spark_elastic.worker.job import current_job
from spark_elastic.worker.world import World

# The words of a Mersenne Twister's state and the position in them, as NumPy lays them out.
_TWISTER_BYTES = 625 * 4
# The header of any Python object: its type, and its reference count, which changes all the time.
_HEAD_BYTES = object.__basicsize__


class Generators:
    """Reads the states of all generators. Used by the user's thread."""

    def __init__(self) -> None:
        self._python: tuple[Sequence[object], object] = ((), None)
        self._numpy: tuple[Sequence[object], object] = ((), None)

    def states(self) -> RandomStates:
        """Return the present states."""
        image = _image_of_python()
        if image != self._python[0]:
            self._python = image, random.getstate()
        image = _image_of_numpy()
        if not image or image != self._numpy[0]:
            self._numpy = image, numpy.random.get_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return self._python[1], self._numpy[1], torch.get_rng_state(), cuda


def seed_newcomer(world: World) -> None:
    """Seed all generators of a rank that has no commit of its own, differently on each rank and in each generation.

    Each seed follows from that of the same generator, so that the numbers repeat of those generators that user code has seeded.
    """
    job = current_job()
    attempt = 0 if job is None or job.checkpoints is None else job.checkpoints.attempt
    here = (attempt, world.generation, world.rank)
    random.seed(_mixed(random.getrandbits(64), *here))
    numpy.random.seed(_mixed(int.from_bytes(numpy.random.bytes(8), "little"), *here))
    torch.manual_seed(_mixed(torch.initial_seed() % 2**64, *here))


def _mixed(*numbers: int) -> int:
    return int(numpy.random.SeedSequence(numbers).generate_state(1)[0])


def _image_of_python() -> tuple[object, ...]:
    """Return what changes whenever Python's generator does: its words, and the number that ``gauss`` keeps for its next call."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a method of the one that the module uses
    return _memory_of(generator, _random.Random), generator.gauss_next


def _image_of_numpy() -> tuple[object, ...]:
    """Return what changes whenever NumPy's generator does; empty for generators that a user has put in its place.

    The words are the bit generator's, and the number that ``normal`` keeps for its next call is the other object's.
    """
    generator: Any = numpy.random.get_state.__self__  # type: ignore[attr-defined]
    bits = generator._bit_generator  # which has a public name from NumPy 1.24 on
    if type(bits) is not numpy.random.MT19937:
        return ()
    return ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES), _memory_of(generator, numpy.random.RandomState)


def _memory_of(value: object, kind: type) -> bytes:
    """Return the memory that an object has for the attributes of a type written in C."""
    return ctypes.string_at(id(value) + _HEAD_BYTES, kind.__basicsize__ - _HEAD_BYTES)
