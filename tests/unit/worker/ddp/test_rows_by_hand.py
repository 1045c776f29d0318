"""What rows that ranks have set for a step make of their gradients' weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_world import on_ranks, world

from spark_elastic.worker.ddp.rows_by_hand import RowsByHand


def weigh(folder: Path, rank: int, rows: list[int]) -> float | str:
    with world(folder, rank, len(rows), []) as made:
        try:
            return RowsByHand(rows[rank], made).weight()
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("rows", "weights"),
    [([3, 1], [1.5, 0.5]), ([2, 0], [2.0, 0.0]), ([0, 0], ["no rank has a row of this global batch"] * 2)],
)
def test_a_mean_over_ranks_with_these_weights_is_the_mean_over_rows(rows: list[int], weights: list[object]) -> None:
    assert on_ranks(2, weigh, rows) == weights
