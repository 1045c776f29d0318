"""The tree of shards: one association for every world, and the rows and shards of each rank."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from spark_elastic.data.shards import Cut, shards_of
from spark_elastic.worker.shards.tree import Node, RunningSum, halves, nodes_of, total

Sum = Any  # a shard, or a pair of sums


def pair(left: Sum, right: Sum) -> Sum:
    return (left, right)


def association(shards: int, size: int, shares: tuple[int, ...] = ()) -> Sum:
    """How a world of this size adds up the shards."""
    sent: dict[Node, Sum] = {}
    for rank in range(size):
        running: RunningSum[Sum] = RunningSum(shards, pair)
        for shard in shards_of(shards, rank, size, shares):
            running.push(shard, shard)
        assert tuple(running.nodes) == nodes_of(shards, shards_of(shards, rank, size, shares))
        sent |= running.nodes
    return total(shards, sent, pair)


@pytest.mark.parametrize("shards", range(1, 49))
def test_worlds_of_all_sizes_add_in_one_order(shards: int) -> None:
    alone = association(shards, 1)
    assert all(association(shards, size) == alone for size in range(2, shards + 1))


@pytest.mark.parametrize("shares", [(1, 23), (23, 1), (5, 13, 6), (7, 1, 1, 15), (11, 2, 2, 2, 7)])
def test_shares_of_any_size_add_in_that_order(shares: tuple[int, ...]) -> None:
    assert association(24, len(shares), shares) == association(24, 1)


def test_a_number_of_shards_that_three_divides_is_cut_into_thirds_first() -> None:
    assert association(6, 1) == (((0, 1), (2, 3)), (4, 5))
    assert association(4, 1) == ((0, 1), (2, 3))
    assert association(5, 1) == (((0, 1), 2), (3, 4))


def test_every_shard_is_computed_once_and_ranks_have_equally_many_up_to_one() -> None:
    for shards in range(1, 49):
        for size in range(1, shards + 1):
            ranges = [shards_of(shards, rank, size) for rank in range(size)]
            assert list(chain(*ranges)) == list(range(shards))
            assert {len(mine) for mine in ranges} <= {shards // size, -(-shards // size)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_ranks_of_common_worlds_send_two_nodes_of_24_shards_at_most(size: int) -> None:
    assert max(len(nodes_of(24, shards_of(24, rank, size))) for rank in range(size)) <= 2
    assert {len(shards_of(24, rank, size)) for rank in range(size)} == {24 // size}


def test_a_running_sum_keeps_no_more_than_the_depth_of_the_tree() -> None:
    running: RunningSum[Sum] = RunningSum(48, pair)
    for shard in range(48):
        running.push(shard, shard)
        assert len(running.nodes) <= 6
    assert list(running.nodes) == [Node(0, 48)]


def test_a_single_shard_has_no_halves() -> None:
    assert halves(Node(3, 4), 24) is None


def test_rows_are_cut_alike_in_all_worlds() -> None:
    for rows in (1, 5, 24, 100, 101):
        for shards in (1, 7, 24):
            cut = Cut(shards, rows, (0, 0, 0))
            bounds = [shard * rows // shards for shard in range(shards + 1)]
            for size in range(1, shards + 1):
                assert sum(cut.rank_rows(size)) == rows
                found = {}
                for rank in range(size):
                    first = sum(cut.rank_rows(size)[:rank])
                    for part in cut.parts(rank, size):
                        if part.weight:
                            found[part.shard] = first + part.start, first + part.stop
                            assert part.weight == (part.stop - part.start) / rows
                assert found == {v: (bounds[v], bounds[v + 1]) for v in range(shards) if bounds[v] < bounds[v + 1]}


def test_a_rank_without_rows_gets_one_part_that_weighs_nothing() -> None:
    cut = Cut(4, 1, (0, 0, 0))
    assert [len(cut.parts(rank, 4)) for rank in range(4)] == [1, 1, 1, 1]
    assert [cut.parts(rank, 4)[0].weight for rank in range(4)] == [0, 0, 0, 1]
    assert cut.parts(0, 4)[0].stop == 1
