"""Which rows of a tensor each rank has, and where they come from when the world changes."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.worker.state.fully_sharded.rows import bounds, choose_giver, choose_kept, pieces

SIZES = range(1, 7)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33])
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_is_cut_as_torch_cuts_it(rows: int, size: int) -> None:
    expected = [len(chunk) for chunk in torch.arange(rows).chunk(size)] if rows else []
    cuts = [bounds(rows, number, size) for number in range(size)]
    assert [last - first for first, last in cuts] == expected + [0] * (size - len(expected))


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33])
@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_new_shards_are_made_of_the_pieces_of_old_ones(rows: int, before: int, after: int) -> None:
    tensor = torch.arange(rows)
    old = [tensor[slice(*bounds(rows, number, before))] for number in range(before)]
    for number in range(after):
        expected = tensor[slice(*bounds(rows, number, after))]
        made = torch.full_like(expected, -1)
        for piece in pieces(rows, number, after, before):
            made[piece.place : piece.place + piece.end - piece.start] = old[piece.old][piece.start : piece.end]
        assert torch.equal(made, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("redundancy", [1, 2])
def test_so_many_neighbours_of_a_ring_as_the_redundancy_says_may_be_lost(size: int, redundancy: int) -> None:
    ring = [2 * place % size for place in range(size)] if size % 2 else list(range(size))
    kept = choose_kept(ring, redundancy)
    assert all(rank in held for rank, held in kept.items())
    for place in range(size):
        lost = {ring[(place + step) % size] for step in range(min(redundancy, size - 1))}
        assert set().union(*(held for rank, held in kept.items() if rank not in lost)) == set(range(size))


def test_a_rank_takes_from_itself_what_it_has_and_else_holders_take_turns() -> None:
    holders = {0: (0, 1), 1: (1, 2), 3: (0, 3)}
    assert [choose_giver(holders, shard, 0) for shard in (0, 1)] == [0, 0]
    assert choose_giver(holders, 2, 0) == 1, "nobody else has it"
    assert {choose_giver(holders, 0, receiver) for receiver in (4, 5)} == {0, 3}
