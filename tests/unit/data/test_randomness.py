"""Generators that a dataset or a function has of its own: they are found wherever they are, and seeded like the others."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.data.randomness import digest_of_random_states, own_generators, seed_own

GENERATOR = np.random.default_rng(0)


class Rows:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 2


class DrawsFromAGlobal(Rows):
    def __getitem__(self, index: int) -> float:
        return float(GENERATOR.random())


class Calls(Rows):
    def method(self) -> None:
        pass


def closure(generator: object) -> Callable[[], object]:
    return lambda: generator


PLACES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda generator: Rows(rng=generator),
    "a wrapped dataset": lambda generator: torch.utils.data.Subset(Rows(rng=generator), [0]),  # type: ignore[arg-type]
    "a list of transforms": lambda generator: Rows(transforms=[Rows(), Rows(rng=generator)]),
    "a dict": lambda generator: Rows(rngs={"flip": generator}),
    "a closure": closure,
    "a module": lambda generator: (module := torch.nn.Identity(), setattr(module, "rng", generator))[0],
    "a partial function": lambda generator: functools.partial(print, generator),
    "a bound method": lambda generator: Calls(rng=generator).method,
    "a cycle": lambda generator: (rows := Rows(rng=generator), vars(rows).update(me=rows))[0],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_found_wherever_it_is(place: str) -> None:
    generator = np.random.default_rng(0)
    assert own_generators(PLACES[place](generator)) == [generator]


def test_a_global_generator_that_items_are_drawn_from_is_found_and_nothing_else() -> None:
    assert own_generators(DrawsFromAGlobal()) == [GENERATOR]
    assert own_generators(Rows(items=list(range(10**6)), words={"a": "b"}), None, random.SystemRandom()) == []


def test_objects_that_raise_when_they_are_looked_at_hide_nothing_else() -> None:
    class Gone:
        pass

    gone, generator = Gone(), np.random.default_rng(0)
    proxy = weakref.proxy(gone)
    del gone

    def convert() -> object:
        return later, generator

    assert own_generators(Rows(proxy=proxy, convert=convert)) == [generator]
    later = None


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(7),
        lambda: np.random.Generator(np.random.MT19937(7)),
        lambda: np.random.RandomState(7),
        lambda: random.Random(7),
        torch.Generator,
    ],
)
def test_each_kind_draws_the_same_after_the_same_seed_and_shows_that_it_was_drawn_from(make: Callable[[], Any]) -> None:
    generators = [make(), make()]

    def draw() -> list[float]:
        return [
            float(torch.rand((), generator=each)) if isinstance(each, torch.Generator) else float(each.random())
            for each in generators
        ]

    seed_own(generators, (3, 0, 11))
    before = digest_of_random_states(generators)
    found = draw()
    assert found[0] != found[1]
    assert digest_of_random_states(generators) != before
    assert draw() != found
    seed_own(generators, (3, 0, 11))
    assert digest_of_random_states(generators) == before
    assert draw() == found
    seed_own(generators, (3, 0, 12))
    assert draw() != found
