"""Columns of numbers and of lists, cut, joined and compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loaded_rows import table_of

from spark_elastic.data import ParquetLoader
from spark_elastic.data.columns import Column, Ragged, Rows, join
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_transform_whose_columns_depend_on_the_rows_is_an_error(tmp_path: Path, shuffle: bool) -> None:
    def columns_of_values(table: pa.Table) -> dict[str, np.ndarray]:
        values = table["v"].to_numpy()
        return {f"is_{value}": (values == value).astype(float) for value in np.unique(values)}

    pq.write_table(table_of(("v", [0, 1] * 50 + [0] * 100)), tmp_path / "one.parquet", row_group_size=50)
    loader = ParquetLoader(tmp_path, 20, shuffle=shuffle, shuffle_rows=40, transform=columns_of_values)
    with pytest.raises(DataError, match=r"have the columns .*; a transform= has to make the same columns of all rows"):
        list(loader)


def ragged(*rows: list[float]) -> Ragged:
    lengths = np.array([len(row) for row in rows], np.int64)
    return Ragged(np.array([value for row in rows for value in row]), np.cumsum(lengths) - lengths, lengths)


def listed(column: Column) -> list[list[float]]:
    assert isinstance(column, Ragged)
    return [
        column.values[start : start + length].tolist()
        for start, length in zip(column.starts, column.lengths, strict=True)
    ]


def test_lists_are_taken_in_any_order_with_their_values_side_by_side() -> None:
    column = ragged([1.0], [2.0, 3.0], [], [4.0])
    taken = column.take(np.array([3, 1, 2, 1]))
    assert listed(taken) == [[4.0], [2.0, 3.0], [], [2.0, 3.0]]
    assert taken.values.tolist() == [4.0, 2.0, 3.0, 2.0, 3.0]
    assert listed(column[1:3]) == [[2.0, 3.0], []]
    assert len(column.take(np.zeros(0, np.int64))) == 0


def test_dense_columns_are_joined_as_they_are_and_with_lists_become_lists() -> None:
    pairs = np.array([[1.0, 2.0], [3.0, 4.0]])
    joined = join([pairs, pairs])
    assert isinstance(joined, np.ndarray)
    assert joined.tolist() == [*pairs.tolist(), *pairs.tolist()]
    assert join([pairs]) is pairs
    assert listed(join([pairs, ragged([5.0]), np.ones((1, 3))])) == [[1.0, 2.0], [3.0, 4.0], [5.0], [1.0, 1.0, 1.0]]


def test_parts_of_lists_are_joined_without_the_values_of_the_rows_that_were_left_out() -> None:
    joined = join([ragged([1.0], [2.0, 3.0], [4.0])[1:2], ragged([5.0], [6.0])[1:]])
    assert listed(joined) == [[2.0, 3.0], [6.0]]
    assert isinstance(joined, Ragged)
    assert joined.values.tolist() == [2.0, 3.0, 6.0]


def test_rows_are_cut_with_all_that_is_known_of_them() -> None:
    rows = Rows(7, np.arange(3), np.array([1, 4, 9]), {"x": np.arange(3.0), "v": ragged([1.0], [], [2.0, 3.0])})
    part = rows[1:]
    assert (len(part), part.group, part.index.tolist(), part.number.tolist()) == (2, 7, [1, 2], [4, 9])
    assert part.columns["x"].tolist() == [1.0, 2.0]  # type: ignore[union-attr]
    assert listed(part.columns["v"]) == [[], [2.0, 3.0]]
