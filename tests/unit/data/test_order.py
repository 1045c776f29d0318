from __future__ import annotations

import numpy as np
from data_worlds import BRIEF, THOROUGH
from drawn_orders import sizes, specs
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.data.balance import even
from spark_elastic.data.order import EpochOrder, OrderSpec, choose_spec


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


@given(rows=st.integers(0, 1000), size=st.integers(1, 40))
@BRIEF
def test_shares_are_even(rows: int, size: int) -> None:
    shares = even(rows, size)
    assert sum(shares) == rows
    assert max(shares) - min(shares) <= 1


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
