"""The random number generators of a process: those of Python, of NumPy, and of torch on the CPU and on each GPU."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# The states of Python's and NumPy's generators, in their own formats, of torch's on the CPU, and of torch's on each GPU.
RandomStates = tuple[Any, Any, torch.Tensor, list[torch.Tensor] | None]


def random_states() -> RandomStates:
    """Return the states of all generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: RandomStates) -> None:
    """Set all generators to states that `random_states` returned."""
    python, numeric, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numeric)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


def seed_all(numbers: Sequence[int]) -> None:
    """Seed all generators by some whole numbers from 0 on, such as a seed, an epoch and the number of a row."""
    # NumPy's SeedSequence takes longer than all that is seeded here together.
    python, numeric, seed = struct.unpack(
        "<QIQ", hashlib.blake2b(repr([*map(int, numbers)]).encode(), digest_size=20).digest()
    )
    random.seed(python)
    np.random.seed(numeric)
    # Torch's manual_seed formats the stack for each kind of device that has not been started yet, which takes a millisecond.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
