"""The random number generators of a process: Python's, NumPy's, and torch's on the CPU and on each GPU."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# The states of Python's and NumPy's generators, in their own formats, then torch's on the CPU and on each GPU.
RandomStates = tuple[Any, Any, torch.Tensor, list[torch.Tensor] | None]


def random_states() -> RandomStates:
    """Return the states of all generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def digest_of_random_states() -> bytes:
    """Return a number that changes whenever any of the generators is drawn from."""
    python, numeric, cpu, cuda = random_states()
    digest = hashlib.blake2b(repr((python, numeric[2:])).encode())
    for state in (numeric[1], cpu.numpy(), *(each.cpu().numpy() for each in cuda or ())):
        digest.update(state.tobytes())
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
