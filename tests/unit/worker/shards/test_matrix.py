"""Ten trainings on shards: the same bits in worlds of all sizes. The worlds are processes with real groups, without a job."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import shard_networks
from forked_world import on_ranks, world

from spark_elastic.data import ElasticDataLoader
from spark_elastic.data.randomness import seed_all
from spark_elastic.data.shards import Cut
from spark_elastic.worker.shards import exchange, parts
from spark_elastic.worker.shards.sharding import Sharding
from spark_elastic.worker.shards.tree import Node

NAMES = list(shard_networks.cases())
STEPS = 3


Found = dict[str, dict[int, tuple[str, list[float]]]]


def add_in_the_order_of_ranks(rank: int) -> None:
    def total(shards: int, have: dict[Node, Any], add: Any) -> Any:
        return functools.reduce(add, have.values())

    exchange.total = total


def draw_by_rank(rank: int) -> None:
    parts.seed_all = lambda numbers: seed_all((*numbers, rank))


def cut_elsewhere(rank: int) -> None:
    Cut._bound = lambda self, shard: -(-shard * self.rows // self.shards)  # type: ignore[method-assign]


MUTANTS = [add_in_the_order_of_ranks, draw_by_rank, cut_elsewhere]


def drawn_shares(seed: int, size: int) -> tuple[int, ...]:
    """Draw how many shards each rank computes."""
    bounds = sorted(random.Random(seed).sample(range(1, shard_networks.SHARDS), size - 1))
    return tuple(stop - start for start, stop in itertools.pairwise([0, *bounds, shard_networks.SHARDS]))


def train(name: str, folder: Path, rank: int, size: int, generation: int) -> tuple[str, list[float]]:
    training = shard_networks.cases()[name]()
    models = list(training.models.values())
    loader = ElasticDataLoader(
        shard_networks.dataset(), global_batch_size=shard_networks.BATCH, shards=shard_networks.SHARDS, seed=3
    )
    with world(folder, rank, size, models, generation) as formed:
        loader.set_world(rank, size)
        sharding = Sharding(models, shard_networks.SHARDS, formed)
        for model in models:
            model.shard(sharding)
        losses: list[float] = []
        for batch, _ in zip(loader, range(STEPS), strict=False):
            losses += training.step(batch)
            if size > 1:  # the next step is divided otherwise
                loader.tracker.divide(drawn_shares(len(losses), size))
        loader.close()
    return shard_networks.digest(training, losses), losses


def play(folder: Path, rank: int, sizes: tuple[int, ...]) -> Found:
    """Train each in one world after the other, from the beginning. Return digests and losses by name and size."""
    found: Found = {name: {} for name in NAMES}
    for number, (size, name) in enumerate((size, name) for size in sizes for name in NAMES):
        if rank < size:
            found[name][size] = train(name, folder, rank, size, number)
    return found


def play_two_loaders(folder: Path, rank: int, sizes: tuple[int, ...]) -> dict[int, str]:
    """Train on two loaders in turn, which cut their batches into different numbers of shards. Return digests by size."""
    found = {}
    for size in (size for size in sizes if rank < size):
        training = shard_networks.cases()["Dense"]()
        models = list(training.models.values())
        loaders = [ElasticDataLoader(shard_networks.dataset(), global_batch_size=24, shards=each) for each in (8, 5)]
        with world(folder, rank, size, models, size) as formed:
            sharding = Sharding(models, 8, formed)
            for loader in loaders:
                loader.set_world(rank, size)
            for model in models:
                model.shard(sharding)
            losses: list[float] = []
            for batches, _ in zip(zip(*loaders, strict=True), range(STEPS), strict=False):
                for batch in batches:
                    losses += training.step(batch)
        assert len(set(losses)) == 2 * STEPS, "it does not train"
        found[size] = shard_networks.digest(training, losses)
    return found


def play_mutants(folder: Path, rank: int, size: int) -> dict[str, str]:
    """Train with each of the mutants. Return digests by name."""
    found = {}
    for number, mutate in enumerate(MUTANTS):
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((exchange, "total"), (parts, "seed_all"), (Cut, "_bound")):
                patch.setattr(owner, name, getattr(owner, name))
            mutate(rank)
            found[mutate.__name__], _ = train("Dense", folder, rank, size, number)
    return found


def assert_equal(name: str, ranks: list[Found]) -> None:
    alone = ranks[0][name][1]
    assert len(set(alone[1])) >= STEPS, "it does not train"
    for found in ranks:
        assert found[name] == dict.fromkeys(found[name], alone)


@pytest.fixture(scope="module")
def two_sizes() -> list[Found]:
    return on_ranks(3, play, (1, 3))


@pytest.fixture(scope="module")
def all_sizes() -> list[Found]:
    return on_ranks(8, play, (1, 2, 3, 4, 5, 8))


def test_mutants_are_caught(two_sizes: list[Found]) -> None:
    right, _ = two_sizes[0]["Dense"][1]
    for found in on_ranks(3, play_mutants, 3):
        assert {name: digest != right for name, digest in found.items()} == {each.__name__: True for each in MUTANTS}


@pytest.mark.parametrize("name", NAMES)
def test_a_training_has_the_same_bits_in_worlds_of_one_and_three(name: str, two_sizes: list[Found]) -> None:
    assert_equal(name, two_sizes)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_training_has_the_same_bits_in_worlds_of_all_sizes(name: str, all_sizes: list[Found]) -> None:
    assert_equal(name, all_sizes)


def test_loaders_with_different_numbers_of_shards_used_in_turn_leave_the_same_bits_in_all_worlds() -> None:
    ranks = on_ranks(3, play_two_loaders, (1, 2, 3))
    for found in ranks:
        assert found == dict.fromkeys(found, ranks[0][1])
