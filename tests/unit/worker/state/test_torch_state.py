"""Random numbers of newcomers: torch's, NumPy's and Python's, different on every rank and in every generation."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from spark_elastic import TorchState


def drawn(generation: int, rank: int) -> tuple[float, float, float]:
    """What a newcomer draws first; every worker starts from the same seeds."""
    torch.manual_seed(7)
    state = TorchState(step=0)
    world: Any = SimpleNamespace(generation=generation, rank=rank)
    state._own_as_newcomer(world)
    return random.random(), float(numpy.random.random()), float(torch.rand(1))


def test_newcomers_draw_random_numbers_of_their_own_rank_and_generation() -> None:
    places = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        drawings = [drawn(*place) for place in places]
        again = [drawn(*place) for place in places]
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])
    assert drawings == again
    for kind in zip(*drawings, strict=True):
        assert len(set(kind)) == len(places)
