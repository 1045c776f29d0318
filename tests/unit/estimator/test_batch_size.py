"""The batch size that a fit picks if its Params give none."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from spark_elastic.estimator.batch_size import LEAST_ROWS, LEAST_SHARE, MOST_NUMBERS, pick_batch_size, width_of


@pytest.mark.parametrize(
    ("rows", "picked"),
    [
        (1, 32),
        (1_000, 32),
        (10_000, 128),
        (65_500, 256),
        (100_000, 256),
        (1_000_000, 1024),
        (10**7, 4096),
        (10**9, 4096),
    ],
)
def test_it_is_about_the_square_root_of_the_rows(rows: int, picked: int) -> None:
    assert pick_batch_size(rows, 20) == picked


def test_an_epoch_has_about_as_many_steps_as_a_step_has_rows_or_more() -> None:
    for rows in range(2 * LEAST_ROWS**2, 10**6, 997):
        picked = pick_batch_size(rows, 1)
        assert math.log2(picked).is_integer()
        assert rows / picked >= picked / 2


@pytest.mark.parametrize(("width", "picked"), [(500, 1024), (3 * 224**2, 64), (MOST_NUMBERS, LEAST_ROWS), (0, 1024)])
def test_wide_rows_get_smaller_batches(width: int, picked: int) -> None:
    assert pick_batch_size(1_000_000, width) == picked


def test_it_depends_on_the_data_alone_and_has_rows_for_all_shards() -> None:
    assert list(inspect.signature(pick_batch_size).parameters) == ["rows", "width", "shards"]
    assert pick_batch_size(1_000, 1, 24) == 24 * LEAST_SHARE
    assert pick_batch_size(1_000, MOST_NUMBERS // 64, 24) == 64
    assert pick_batch_size(1_000, MOST_NUMBERS, 48) == 48
    assert pick_batch_size(100_000, 1, 24) == 256


def test_the_width_of_a_row_is_counted_in_numbers_of_all_columns() -> None:
    lists = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(6), torch.zeros(3)], layout=torch.jagged)
    assert width_of({"x": torch.zeros(3, 5), "y": torch.zeros(3, dtype=torch.int64), "lists": lists}) == 5 + 1 + 4
