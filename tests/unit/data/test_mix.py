from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.mix import MixOrder, rows_of_epoch


@pytest.mark.parametrize(
    ("weights", "rows", "counts"),
    [
        ([0.1, 0.9], [100, 5000], (100, 900)),
        ([0.5, 0.5], [7, 7], (7, 7)),
        ([0.5, 0.5], [1, 100], (1, 1)),
        ([1 / 3, 2 / 3], [10, 10], (5, 10)),
        ([0.2, 0.3, 0.5], [20, 31, 50], (20, 30, 50)),
    ],
)
def test_an_epoch_has_all_rows_of_one_dataset_and_the_others_in_proportion(
    weights: list[float], rows: list[int], counts: tuple[int, ...]
) -> None:
    assert rows_of_epoch(weights, rows) == counts


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 10**7)), min_size=2, max_size=5))
def test_no_row_comes_twice_and_the_proportions_are_met(parts: list[tuple[float, int]]) -> None:
    rows = [count for _, count in parts]
    weights = [weight / sum(weight for weight, _ in parts) for weight, _ in parts]
    counts = rows_of_epoch(weights, rows)
    assert all(count <= row for count, row in zip(counts, rows, strict=True))
    assert all(abs(count - weight * sum(counts)) <= 1 for count, weight in zip(counts, weights, strict=True))
    assert any(count >= row - 2 / weight for count, row, weight in zip(counts, rows, weights, strict=True))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=2, max_size=4).filter(any), st.integers(0, 5), st.data())
def test_the_position_tells_the_position_in_each_dataset(counts: list[int], epoch: int, data: st.DataObject) -> None:
    order = MixOrder(counts, seed=3, epoch=epoch)
    datasets = order.datasets(0, order.total)
    assert np.bincount(datasets, minlength=len(counts)).tolist() == counts
    ticket = data.draw(st.integers(0, order.total))
    assert order.given(ticket).tolist() == np.bincount(datasets[:ticket], minlength=len(counts)).tolist()
    stop = data.draw(st.integers(ticket, order.total))
    assert order.datasets(ticket, stop).tolist() == datasets[ticket:stop].tolist()
    whole = order.total // 1024 * 1024
    expected = np.array(counts) * whole / order.total
    assert (abs(order.given(whole) - expected) < len(counts)).all()


def test_the_order_depends_on_seed_and_epoch_and_is_no_pattern() -> None:
    orders = [MixOrder([500, 500], seed, epoch).datasets(0, 1000) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert 400 < np.count_nonzero(np.diff(orders[0])) < 600
    assert MixOrder([500, 500], 0, 0).datasets(0, 1000).tolist() == orders[0].tolist()


def test_a_huge_mix_is_as_quick_to_find_a_place_in() -> None:
    order = MixOrder([10**12, 3 * 10**12 + 1], 0, 0)
    assert abs(order.given(10**12 + 77) - np.array([10**12 // 4, 3 * 10**12 // 4])).max() < 100
