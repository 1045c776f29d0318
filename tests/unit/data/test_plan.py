"""Global steps: their rows, tails, and the ranks' shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_worlds import BRIEF, THOROUGH
from drawn_orders import plans, sizes, specs
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.data import ParquetLoader
from spark_elastic.data.order import OrderSpec, choose_spec
from spark_elastic.data.plan import BatchPlan, draw, make_step
from spark_elastic.data.tracker import RowGroupTracker


def test_what_cannot_be_balanced_is_refused(dataset: Path) -> None:
    with pytest.raises(ValueError, match='balance must be "auto" or None, not True'):
        ParquetLoader(dataset, global_batch_size=8, balance=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='balance="auto" needs global_batch_size='):
        ParquetLoader(dataset, 8, balance="auto")


@THOROUGH
@given(rows=sizes, spec=specs, plan=plans, size=st.integers(1, 8), start=st.floats(0, 1), block=st.integers(1, 5))
def test_the_ranks_of_a_world_share_the_rest_of_an_epoch_without_gap_or_overlap(
    rows: np.ndarray, spec: OrderSpec, plan: BatchPlan, size: int, start: float, block: int
) -> None:
    tracker = RowGroupTracker(rows, spec, plan)
    tracker.set_world(0, size)
    position = first = int(tracker.total * start)
    tickets: list[int] = []
    steps = 0
    while found := tracker.upcoming(position, block):
        for rank in range(size):
            drawn = draw(tracker.order, found, rank)
            for number, step in enumerate(found):
                part = slice(drawn.offsets[number], drawn.offsets[number + 1])
                mine = (drawn.positions[part] * spec.lanes + drawn.lanes[part]).tolist()
                assert mine, "a rank got no rows"
                if step.rank_rows[rank]:
                    assert len(mine) == step.rank_rows[rank]
                    assert drawn.ticket_sums[number] == sum(mine)
                    tickets += mine
                else:
                    assert drawn.ticket_sums[number] == 0
                    assert set(mine) <= set(range(step.start, step.start + step.rows))
        for step in found:
            assert sum(step.rank_rows) == step.rows
            assert max(step.rank_rows) - min(step.rank_rows) <= 1
        position = found[-1].start + found[-1].rows
        steps += len(found)
    assert sorted(tickets) == list(range(first, position))
    assert steps == plan.steps(tracker.total - first, size)
    left = tracker.total - position
    assert left == 0 or (plan.drop_last and left < plan.batch(size))


@THOROUGH
@given(total=st.integers(0, 3000), batch=st.integers(1, 300), size=st.integers(1, 8))
def test_no_rank_gets_a_single_row_unless_the_epoch_or_the_batch_is_that_small(
    total: int, batch: int, size: int
) -> None:
    for plan in (BatchPlan(batch, None), BatchPlan(None, batch)):
        if plan.batch(size) < 2 * size or total < plan.batch(size):
            continue
        left = total
        while rows := plan.next_rows(left, size):
            assert min(make_step(plan, 0, rows, size).rank_rows) >= 2
            left -= rows


@pytest.mark.parametrize("size", [9, 16, 48, 64])
@pytest.mark.parametrize("tail", [16, 17, 40, 90])
def test_in_a_large_world_a_small_tail_goes_to_fewer_ranks_rather_than_one_row_to_each(size: int, tail: int) -> None:
    step = make_step(BatchPlan(None, 1024), 0, tail, size)
    assert sum(step.rank_rows) == tail
    assert 1 not in step.rank_rows


@BRIEF
@given(total=st.integers(0, 5000), batch=st.integers(1, 300), drop=st.booleans())
def test_steps_of_a_global_batch_size_do_not_depend_on_the_world(total: int, batch: int, drop: bool) -> None:
    plan = BatchPlan(None, batch, drop)

    def steps(size: int) -> list[int]:
        found, left = [], total
        while rows := plan.next_rows(left, size):
            found.append(rows)
            left -= rows
        return found

    assert all(steps(size) == steps(1) for size in range(2, 12))


def test_a_tail_joins_the_step_before_it_only_where_a_rank_would_be_left_with_one_row() -> None:
    plan = BatchPlan(8, None)
    assert plan.next_rows(16 + 3, 2) == 16 + 3
    assert plan.next_rows(16 + 4, 2) == 16
    assert BatchPlan(None, 64).next_rows(64 + 15, 4) == 79
    assert BatchPlan(None, 64).next_rows(64 + 16, 4) == 64
    assert BatchPlan(8, None, drop_last=True).next_rows(16 + 3, 2) == 16
    assert BatchPlan(8, None, drop_last=True).next_rows(15, 2) == 0


def test_arguments_that_do_not_fit_name_their_values() -> None:
    with pytest.raises(ValueError, match="not batch_size=None and"):
        BatchPlan(None, None)
    with pytest.raises(ValueError, match="not batch_size=3 and global_batch_size=4"):
        BatchPlan(3, 4)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on, not 0"):
        BatchPlan(0, None)
    with pytest.raises(ValueError, match="shuffle_rows must be a whole number from 0 on, not -1"):
        choose_spec(groups=3, batch=1, seed=0, shuffle=True, shuffle_rows=-1, row_bytes=1)
