"""The states of random number generators are read again whenever a number has been drawn, and only then."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch

from spark_elastic.data.randomness import set_random_states
from spark_elastic.worker.state.generators import Generators


@pytest.fixture(autouse=True)
def generators() -> Iterator[Generators]:
    """Generators with states in which no second normal number is kept; the process gets its own states back."""
    generators = Generators()
    before = generators.states()
    random.seed(1)
    numpy.random.seed(1)
    yield generators
    set_random_states(before)


def test_states_that_have_not_moved_are_not_read_again(generators: Generators) -> None:
    first, second = generators.states(), generators.states()
    assert second[0] is first[0]
    assert second[1] is first[1]


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.seed(2),
        numpy.random.rand,
        numpy.random.normal,
        lambda: numpy.random.permutation(5),
        lambda: numpy.random.seed(2),
        lambda: torch.rand(1),
    ],
)
def test_every_draw_is_noticed(generators: Generators, draw: Callable[[], object]) -> None:
    for _ in range(3):  # of two normal numbers the second one comes without a draw
        generators.states()
        draw()
        python, numeric, cpu, _ = generators.states()
        assert python == random.getstate()
        assert [str(part) for part in numeric] == [str(part) for part in numpy.random.get_state()]
        numpy.testing.assert_array_equal(numeric[1], numpy.random.get_state()[1])
        assert torch.equal(cpu, torch.get_rng_state())


def test_the_second_normal_number_that_numpy_keeps_belongs_to_the_state(generators: Generators) -> None:
    numpy.random.normal()
    states = generators.states()
    second = numpy.random.normal()
    generators.states()
    set_random_states(states)
    assert numpy.random.normal() == second
    set_random_states(states)
    assert generators.states()[1][3] == 1


@pytest.mark.filterwarnings("ignore:get_state and legacy")
@pytest.mark.skipif(not hasattr(numpy.random, "set_bit_generator"), reason="NumPy has this from 1.24 on")
def test_a_generator_of_another_kind_is_read_each_time(generators: Generators) -> None:
    own = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        states = generators.states()
        drawn = numpy.random.rand()
        generators.states()
        set_random_states(states)
        assert numpy.random.rand() == drawn
    finally:
        numpy.random.set_bit_generator(own)
