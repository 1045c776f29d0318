"""Contributions of shards are added up over ranks in the order of the tree, to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_world import on_ranks, world

from spark_elastic.data.shards import Cut
from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.shards.exchange import add_over_ranks
from spark_elastic.worker.shards.tree import Node, RunningSum

SHARDS = 6
LENGTHS = (12, 24)


def contributions(shard: int) -> list[torch.Tensor]:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(shard)
    return [torch.randn(length, generator=generator) * 10.0 ** (shard % 3 * 3) for length in LENGTHS]


def add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one + other for one, other in zip(left, right, strict=True)]


def nodes(mine: range) -> dict[Node, list[torch.Tensor]]:
    running: RunningSum[list[torch.Tensor]] = RunningSum(SHARDS, add)
    for shard in mine:
        running.push(shard, contributions(shard))
    return running.nodes


def room(number: int, like: torch.Tensor, length: int) -> torch.Tensor:
    return like.new_empty(length)


def sums_of(folder: Path, rank: int, shares: tuple[int, ...]) -> list[list[float]]:
    cut, size = Cut(SHARDS, 60, shares=shares), len(shares)
    with world(folder, rank, size, []) as formed:
        sums = add_over_ranks(cut, nodes(cut.shards_of(rank, size)), room, formed)
        return [flat.tolist() for flat in sums]


@pytest.mark.parametrize("shares", [(3, 3), (1, 5), (2, 2, 2), (1, 4, 1)])
def test_all_ranks_get_the_bits_that_a_world_of_one_gets(shares: tuple[int, ...]) -> None:
    alone = add_over_ranks(Cut(SHARDS, 60), nodes(range(SHARDS)), room, None)
    assert on_ranks(len(shares), sums_of, shares) == [[flat.tolist() for flat in alone]] * len(shares)


def test_the_numbers_are_such_that_the_order_shows() -> None:
    in_a_row = torch.stack([contributions(shard)[0] for shard in range(SHARDS)]).sum(0)
    (alone, _) = nodes(range(SHARDS))[Node(0, SHARDS)]
    assert not torch.equal(in_a_row, alone)
    assert torch.allclose(in_a_row, alone, rtol=1e-3)


def test_in_a_broken_world_nothing_is_sent() -> None:
    broken: Any = SimpleNamespace(size=2, generation=7, is_broken=lambda: True)
    with pytest.raises(WorkerLostError, match="generation 7 is broken"):
        add_over_ranks(Cut(SHARDS, 60), nodes(range(3)), room, broken)
