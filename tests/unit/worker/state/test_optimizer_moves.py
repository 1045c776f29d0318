"""Who sends the state of which parameters to whom when the world of a divided optimizer changes."""

from __future__ import annotations

import pytest

from spark_elastic.protocol.messages import Member
from spark_elastic.worker.optimizers.zero import deal
from spark_elastic.worker.state.keepers.sharded import division_of
from spark_elastic.worker.state.optimizer_moves import numbers_by_rank, plan_moves

SIZES = [40, 30, 20, 20, 10, 5, 5, 1, 1, 1]


def members(size: int) -> list[Member]:
    return [Member(rank, rank, rank, size, 0, 1, None) for rank in range(size)]


def held(size: int, redundancy: int) -> dict[int, tuple[int, ...]]:
    division = division_of(members(size), 0, redundancy)
    assert division is not None
    return dict(enumerate(division.held))


@pytest.mark.parametrize("redundancy", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(4, 6), (6, 4), (5, 2), (8, 7), (4, 1), (4, 4)])
def test_each_rank_gets_what_it_lacks_from_one_that_has_it_and_nothing_else(
    before: int, after: int, redundancy: int
) -> None:
    lost = 1 if before > after else None
    holders = {rank: parts for rank, parts in held(before, redundancy).items() if rank != lost}
    wanted = numbers_by_rank(SIZES, division_of(members(after), 0, redundancy), after)
    moves = plan_moves(SIZES, holders, before, wanted)
    parts = deal(SIZES, before)
    for rank, numbers in wanted.items():
        have = {number for number, part in enumerate(parts) if part in holders.get(rank, ())}
        assert {number for receiver, number in moves if receiver == rank} == set(numbers) - have
    assert all(parts[number] in holders[sender] for (_, number), sender in moves.items())
    assert set().union(*wanted.values()) == set(range(len(SIZES))), "each is kept by somebody"


def test_in_a_world_of_the_same_ranks_nothing_is_sent() -> None:
    wanted = numbers_by_rank(SIZES, division_of(members(4), 0, 1), 4)
    assert plan_moves(SIZES, held(4, 1), 4, wanted) == {}


@pytest.mark.parametrize(("size", "redundancy"), [(1, 1), (2, 1), (3, 2)])
def test_small_worlds_divide_nothing(size: int, redundancy: int) -> None:
    assert division_of(members(size), 0, redundancy) is None
