"""Filters: which row groups are read, which rows pass, and what does not fit."""

from __future__ import annotations

import collections
import datetime
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from data_worlds import World
from loaded_rows import batch_of, ids, table_of

from spark_elastic.data import ParquetLoader, read_manifest
from spark_elastic.data.filters import RowFilter
from spark_elastic.data.pinning import key_of, set_pin
from spark_elastic.data.predicates import in_intersection, in_lambda
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


def test_filters_are_counted_before_the_first_step(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16, filters=[("id", ">=", 100), ("id", "!=", 150)], with_row_ids=True)
    assert loader.rows_total == 102
    found = []
    starts = np.cumsum([0, *[group.rows for group in loader.manifest]])
    for batch in loader:
        found += batch["id"].tolist()
        assert (starts[batch["_row_group"]] + batch["_row"].numpy()).tolist() == batch["id"].tolist()
    assert sorted(found) == [row for row in range(100, 203) if row != 150]
    assert sorted(
        ids(ParquetLoader(dataset, 16, filters=pc.field("id") % 2 == 0 if False else pc.field("id") < 7))
    ) == list(range(7))


def test_filters_exclude_row_groups_by_their_statistics(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_elastic.data.source import Source

    read = []
    batches = Source.batches
    monkeypatch.setattr(Source, "batches", lambda self, group, *rest: read.append(group) or batches(self, group, *rest))
    loader = ParquetLoader(dataset, 16, filters=[("id", ">", 190)], columns=["x"])
    assert len(read) == 2
    assert sum(len(batch["x"]) for batch in loader) == 12
    assert len(set(read)) == 2


def test_a_filter_that_does_not_fit_is_refused(dataset: Path) -> None:
    with pytest.raises(ValueError, match="does not fit the dataset's columns"):
        ParquetLoader(dataset, 16, filters=[("nope", "=", 1)])
    with pytest.raises(ValueError, match="filters="):
        ParquetLoader(dataset, 16, filters=[("id", "?", 1)])


LARGE = [2**64 - 1 - row for row in range(4)]


@pytest.mark.parametrize(
    ("filters", "passing"),
    [
        ([("u", ">", LARGE[2])], LARGE[:2]),
        ([("u", ">", 5)], LARGE),
        ([["u", "=", LARGE[3]]], LARGE[3:]),
        ([[("u", "=", LARGE[0])], [("id", "=", 1)]], LARGE[:2]),
        ([("u", "in", {1, LARGE[1]})], [LARGE[1]]),
        ([("u", "in", (None, LARGE[1]))], [LARGE[1]]),
        ([("u", "not in", [LARGE[1], LARGE[2]])], [LARGE[0], LARGE[3]]),
        ([[("u", "=", np.int64(2))], [("id", "=", 0)]], LARGE[:1]),
        ([("u", "!=", np.int8(2))], LARGE),
        ([[("u", "=", -1)], [("id", "=", 0)]], LARGE[:1]),
        ([[("u", "==", np.int64(-1))], [("id", "=", 0)]], LARGE[:1]),
        ([[("u", "<=", -1)], [("id", "=", 0)]], LARGE[:1]),
        ([[("u", "<", -1)], [("id", "=", 0)]], LARGE[:1]),
        ([("u", "!=", -1)], LARGE),
        ([("u", ">", -1)], LARGE),
        ([("u", ">=", -(2**70))], LARGE),
        ([[("u", "in", [-1, 5])], [("id", "=", 0)]], LARGE[:1]),
        ([("u", "in", [-1, LARGE[1]])], [LARGE[1]]),
        ([("u", "not in", [np.int64(-1)])], LARGE),
    ],
)
def test_columns_of_unsigned_numbers_are_compared_with_all_of_these(
    filters: object, passing: list[int], tmp_path: Path
) -> None:
    pq.write_table(pa.table({"id": range(4), "u": pa.array(LARGE, pa.uint64())}), tmp_path / "one.parquet")
    (batch,) = ParquetLoader(tmp_path, 4, shuffle=False, filters=filters)
    assert batch["u"].numpy().tolist() == passing


@pytest.mark.parametrize("value", [True, [-1, 2.5]])
def test_what_is_not_a_whole_number_is_compared_with_unsigned_numbers_by_pyarrow(value: object, tmp_path: Path) -> None:
    pq.write_table(pa.table({"u": pa.array([1, 2, 3], pa.uint64())}), tmp_path / "one.parquet")
    if value is True:
        with pytest.raises(ValueError, match="does not fit the dataset's columns"):
            ParquetLoader(tmp_path, 4, filters=[("u", "=", value)])
    else:
        loader = ParquetLoader(tmp_path, 4, shuffle=False, filters=[("u", "not in", value)])
        assert next(iter(loader))["u"].numpy().tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
@pytest.mark.parametrize(
    ("predicate", "passing"),
    [
        (("f", "<", 2**63), [0, 1]),
        (("f", ">", -(2**70)), [1, 2, 3]),
        (("f", "=", 2**64), [3]),
        (("f", "in", {1, None, 2**63}), [1, 2]),
    ],
)
def test_columns_of_floats_are_compared_with_whole_numbers_beyond_int64(
    predicate: tuple[str, str, object], passing: list[int], kind: pa.DataType, tmp_path: Path
) -> None:
    values = pa.array([-(2.0**70), 1.0, 2.0**63, 2.0**64], kind)
    pq.write_table(pa.table({"id": range(4), "f": values}), tmp_path / "one.parquet")
    assert ids(ParquetLoader(tmp_path, 4, shuffle=False, filters=[predicate])) == passing


def test_small_numbers_identify_a_filter_of_unsigned_numbers_as_in_earlier_releases(tmp_path: Path) -> None:
    pq.write_table(pa.table({"u": pa.array([1, 2, 3], pa.uint64())}), tmp_path / "one.parquet")
    manifest = read_manifest(tmp_path)
    assert RowFilter(manifest, [("u", ">", 1)]).text == "(u > 1)"
    assert RowFilter(manifest, [("u", "in", [1, 2])]).text == str(pc.field("u").isin([1, 2]))
    # pyarrow abbreviates the text of a hundred numbers, so that it has a hash of the whole expression.
    many: list[object] = [("u", ">", 1), ("u", "in", list(range(100)))]
    expression = pq.filters_to_expression(many)
    assert RowFilter(manifest, many).text == f"{expression} {key_of(expression)}"


@pytest.mark.parametrize(
    "predicate",
    [
        ("u", "<", 2**64),
        ("u", "in", [2**70]),
        ("id", "<", 2**63),
        ("id", "in", [2**63]),
    ],
)
def test_a_number_that_no_value_of_the_column_can_have_is_refused_with_those_that_can_be_given(
    predicate: tuple[str, str, object], tmp_path: Path
) -> None:
    pq.write_table(pa.table({"id": range(4), "u": pa.array(LARGE, pa.uint64())}), tmp_path / "one.parquet")
    with pytest.raises(ValueError, match="too large or too small: columns of uint64 are compared with those"):
        ParquetLoader(tmp_path, 4, filters=[predicate])


def test_times_without_a_zone_do_not_filter_those_with_one(tmp_path: Path) -> None:
    times = pa.array([datetime.datetime(2024, 1, 1)], pa.timestamp("us", "UTC"))
    with pytest.raises(ValueError, match="does not fit the dataset's columns: Cannot compare timestamp with timezone"):
        batch_of(tmp_path, table_of(("v", [1]), ("t", times)), filters=[("t", ">", datetime.datetime(2023, 1, 1))])


def test_filters_differ_by_any_of_their_values_and_not_by_the_order_of_a_set(dataset: Path) -> None:
    def named(values: Any) -> tuple[object, str | None]:
        loader = ParquetLoader(dataset, 16, filters=[("id", "in", values)])
        return loader.identity["filters"], RowFilter(loader.manifest, [("id", "in", values)]).key

    assert named(list(range(100))) == named(list(range(100)))
    (text, key), (other_text, other_key) = named(list(range(100))), named([*range(50), 150, *range(51, 100)])
    assert text != other_text
    assert key != other_key
    one, other = {8, 0}, {0, 8}
    assert list(one) != list(other)
    assert named(one) == named(other)


@pytest.mark.parametrize("kind", [str, str.encode])
def test_filters_differ_by_the_end_of_a_long_value(tmp_path: Path, kind: Any) -> None:
    """pyarrow cuts long values where it prints an expression."""
    table = table_of(("n", [1, 2]), ("v", [kind("x" * 200 + end) for end in "ab"]))
    pq.write_table(table, tmp_path / "part-0.parquet")

    def named(end: str) -> tuple[object, str | None, int]:
        filters = [("v", "in", [kind("x" * 200 + end)])]
        loader = ParquetLoader(tmp_path, 16, filters=filters)
        return loader.identity["filters"], RowFilter(loader.manifest, filters).key, loader.rows_total

    (one, key, rows), (other, other_key, others) = named("a"), named("b")
    assert one != other
    assert key != other_key
    assert (rows, others) == (1, 1)


def test_a_column_by_its_position_is_refused(dataset: Path) -> None:
    with pytest.raises(ValueError, match="gives a column by its position: give its name"):
        ParquetLoader(dataset, 16, filters=(pc.field("id") >= 0) & (pc.field(0) >= 70))


def test_filtered_rows_count_once_through_a_reset(dataset: Path) -> None:
    world = World(lambda: ParquetLoader(dataset, 8, filters=[[("id", "<", 40)], [("id", ">", 99)]]), 3)
    world.train_through_a_loss()
    assert world.counted == collections.Counter({(0, row): 1 for row in [*range(40), *range(100, 203)]})


def test_rows_are_counted_once_a_job_for_each_predicate(dataset: Path) -> None:
    pinned: dict[str, bytes] = {}
    set_pin(lambda key, make: pinned.setdefault(key, b"") or pinned.update({key: make()}) or pinned[key])
    try:
        totals = [
            ParquetLoader(dataset, 16, predicate=in_lambda(["id"], lambda row, less: row < less, less)).rows_total
            for less in (5, 7, 5)
        ]
        cannot_be_pickled = in_lambda(["id"], lambda row, lock: row < 9, threading.Lock())
        assert ParquetLoader(dataset, 16, predicate=cannot_be_pickled).rows_total == 9
    finally:
        set_pin(None)
    assert totals == [5, 7, 5]
    assert len([key for key in pinned if key.startswith("data/filter/")]) == 2


def test_a_predicate_that_changes_its_mind_is_an_error(dataset: Path) -> None:
    calls = itertools.count()
    loader = ParquetLoader(dataset, 16, predicate=in_lambda(["id"], lambda row: next(calls) % 3 == 0))
    with pytest.raises(DataError, match="other rows pass now than when they were counted"):
        list(loader)


def test_an_error_of_a_predicate_names_the_row_group(dataset: Path) -> None:
    with pytest.raises(DataError, match=r"part-0.parquet, row group 0: predicate raised ZeroDivisionError"):
        ParquetLoader(dataset, 16, predicate=in_lambda(["x"], lambda x: 1 // 0))
    with pytest.raises(DataError, match="in_intersection needs lists in 'id', not"):
        ParquetLoader(dataset, 16, predicate=in_intersection([1], "id"))


def test_a_column_that_files_have_twice_is_no_column_to_filter_by(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], names=["x", "x", "y"])
    pq.write_table(table, tmp_path / "0.parquet")
    for choice in ({"filters": [("x", ">", 0)]}, {"predicate": in_lambda(["x"], bool)}):
        with pytest.raises(DataError, match=f"{tmp_path}: the files have several columns named 'x', which filters="):
            ParquetLoader(tmp_path, 2, columns=["y"], **choice)
    loader = ParquetLoader(tmp_path, 2, columns=["y"], filters=[("y", ">", 5)])
    assert [row for batch in loader for row in batch["y"].tolist()] == [6]
