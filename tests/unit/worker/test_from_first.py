"""Tensors of rank 0 for all ranks, in a real group."""

from __future__ import annotations

from pathlib import Path

import torch
from forked_world import on_ranks, world

from spark_elastic.worker.from_first import broadcast_from_first


def give_tensors_with_gaps(folder: Path, rank: int) -> list[list[float]]:
    """Give a tensor that is every other element of one that has to keep the others, one in another order, and expanded ones."""
    memory = torch.arange(6.0) + 10 * rank
    turned = (torch.arange(6.0) + 10 * rank).reshape(2, 3).t()
    repeated = (torch.arange(2.0) + 10 * rank)[:, None].expand(2, 3)
    number = torch.tensor(5.0 + rank).expand(2, 2)
    with world(folder, rank, 2, []):
        broadcast_from_first((memory[::2], turned, repeated, number))
    return [memory.tolist(), *(tensor.flatten().tolist() for tensor in (turned, repeated, number))]


def test_tensors_with_gaps_get_the_values_of_the_first_rank() -> None:
    first, second = on_ranks(2, give_tensors_with_gaps)
    assert first == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0], [0.0] * 3 + [1.0] * 3, [5.0] * 4]
    assert second == [[0.0, 11.0, 2.0, 13.0, 4.0, 15.0], *first[1:]]
