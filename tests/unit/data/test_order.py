from __future__ import annotations

import numpy as np
import pytest
from data_worlds import BRIEF, THOROUGH
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.data.balance import even
from spark_elastic.data.order import EpochOrder, OrderSpec, choose_spec
from spark_elastic.data.plan import BatchPlan, draw, make_step
from spark_elastic.data.tracker import RowGroupTracker

sizes = st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 40), st.just(300)), max_size=12).map(
    lambda found: np.array(found, np.int64)
)
specs = st.builds(
    OrderSpec,
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    lanes=st.integers(1, 9),
    window=st.integers(1, 50),
    mix=st.booleans(),
)
plans = st.one_of(
    st.builds(BatchPlan, st.integers(1, 20), st.none(), st.booleans()),
    st.builds(BatchPlan, st.none(), st.integers(1, 60), st.booleans()),
)


def visit(order: EpochOrder, lanes: np.ndarray, positions: np.ndarray) -> list[tuple[int, int]]:
    """Return the (row group, row) at each place, found one by one."""
    found = []
    for lane, position in zip(lanes.tolist(), positions.tolist(), strict=True):
        window = int(order.window_of(np.array([lane]), np.array([position]))[0])
        start, _ = order.window_bounds(lane, window)
        offset = int(order.window_order(lane, window)[position - start])
        for piece in order.window_pieces(lane, window):
            if offset < piece.stop - piece.start:
                found.append((piece.group, piece.start + offset))
                break
            offset -= piece.stop - piece.start
    return found


@THOROUGH
@given(rows=sizes, spec=specs, epoch=st.integers(0, 3))
def test_every_row_is_at_exactly_one_place_of_the_order(rows: np.ndarray, spec: OrderSpec, epoch: int) -> None:
    order = EpochOrder(rows, epoch, spec)
    places = [(lane, position) for lane in range(spec.lanes) for position in range(int(order.lane_rows[lane]))]
    lanes, positions = np.array(places, np.int64).reshape(-1, 2).T
    everything = [(group, row) for group, count in enumerate(rows.tolist()) for row in range(count)]
    assert sorted(visit(order, lanes, positions)) == everything


@THOROUGH
@given(rows=sizes, spec=specs)
def test_windows_of_a_lane_follow_each_other_without_a_gap_and_hold_no_more_than_they_may(
    rows: np.ndarray, spec: OrderSpec
) -> None:
    order = EpochOrder(rows, 0, spec)
    for lane in range(spec.lanes):
        position, window = 0, 0
        while position < order.lane_rows[lane]:
            start, stop = order.window_bounds(lane, window)
            assert start == position
            assert stop - start <= spec.window
            if start < stop:
                assert (order.window_of(np.full(stop - start, lane), np.arange(start, stop)) == window).all()
            position, window = stop, window + 1


@BRIEF
@given(rows=sizes, spec=specs, consumed=st.floats(0, 1))
def test_processed_rows_by_row_group_are_those_that_the_tickets_name(
    rows: np.ndarray, spec: OrderSpec, consumed: float
) -> None:
    order = EpochOrder(rows, 1, spec)
    count = int(order.total * consumed)
    tickets = np.arange(count)
    expected = np.zeros(len(rows), np.int64)
    for group, _ in visit(order, tickets % spec.lanes, tickets // spec.lanes):
        expected[group] += 1
    assert np.array_equal(order.processed(count, len(rows)), expected)


def test_epochs_and_seeds_differ_and_the_same_ones_are_the_same() -> None:
    rows = np.full(20, 10)

    def sequence(seed: int, epoch: int) -> list[int]:
        return EpochOrder(rows, epoch, OrderSpec(seed, True, 4, 16, True)).groups.tolist()

    assert sequence(0, 0) == sequence(0, 0)
    assert len({tuple(sequence(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_each_window_of_each_lane_is_shuffled_in_an_order_of_its_own() -> None:
    order = EpochOrder(np.full(8, 100), 0, OrderSpec(0, True, 4, 50, True))
    orders = [tuple(order.window_order(lane, window)) for lane in range(4) for window in (1, 2)]
    assert {len(found) for found in orders} == {50}
    assert len(set(orders)) == len(orders)


def test_no_two_lanes_come_to_the_end_of_a_window_at_the_same_step() -> None:
    order = EpochOrder(np.full(8, 100), 0, OrderSpec(0, True, 4, 50, True))
    ends = [order.window_bounds(lane, window)[1] for lane in range(4) for window in range(3)]
    assert len(set(ends)) == len(ends)


def test_the_global_random_state_is_neither_read_nor_changed() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    order = EpochOrder(np.full(9, 50), 0, OrderSpec(0, True, 2, 64, True))
    order.window_order(0, 1)
    assert np.random.get_state()[1].tolist() == before


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


@given(rows=st.integers(0, 1000), size=st.integers(1, 40))
@BRIEF
def test_shares_are_even(rows: int, size: int) -> None:
    shares = even(rows, size)
    assert sum(shares) == rows
    assert max(shares) - min(shares) <= 1


def test_arguments_that_do_not_fit_name_their_values() -> None:
    with pytest.raises(ValueError, match="not batch_size=None and"):
        BatchPlan(None, None)
    with pytest.raises(ValueError, match="not batch_size=3 and global_batch_size=4"):
        BatchPlan(3, 4)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on, not 0"):
        BatchPlan(0, None)
    with pytest.raises(ValueError, match="shuffle_rows must be a whole number from 0 on, not -1"):
        choose_spec(groups=3, batch=1, seed=0, shuffle=True, shuffle_rows=-1, row_bytes=1)


@BRIEF
@given(
    groups=st.integers(0, 200_000),
    batch=st.integers(1, 5000),
    rows=st.one_of(st.none(), st.integers(0, 10**6)),
    size=st.floats(0, 1e9),
    shuffle=st.booleans(),
)
def test_windows_of_all_lanes_stay_within_what_was_asked_for(
    groups: int, batch: int, rows: int | None, size: float, shuffle: bool
) -> None:
    spec = choose_spec(groups=groups, batch=batch, seed=0, shuffle=shuffle, shuffle_rows=rows, row_bytes=size)
    allowed = rows if shuffle and rows not in (None, 0, 1) else 65_536
    assert spec.lanes * spec.window <= allowed
    if rows is None and size >= 1:
        assert spec.lanes * spec.window * size <= max(size, 2**28)
