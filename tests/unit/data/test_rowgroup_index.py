"""The index of row groups that Petastorm leaves in a dataset: read without Petastorm, and refused where it is of other files."""

from __future__ import annotations

import json
import os
import pickle
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data import ParquetLoader
from spark_elastic.data.rowgroup_index import INDEX_KEY, read_indexes
from spark_elastic.data.selectors import (
    IntersectIndexSelector,
    RowGroupSelectorBase,
    SingleIndexSelector,
    UnionIndexSelector,
)
from spark_elastic.errors import DataError

COUNTED = b"dataset-toolkit.num_row_groups_per_file.v1"


@pytest.fixture
def indexer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes what pickles as one of Petastorm's indexers; no such module is there when an index is read."""
    fake: Any = types.ModuleType("petastorm.etl.rowgroup_indexers")

    class SingleFieldIndexer:
        def __init__(self, data: Any) -> None:
            self._index_name, self._column_name, self._index_data = "by id", "id", data

    SingleFieldIndexer.__module__, SingleFieldIndexer.__qualname__ = fake.__name__, "SingleFieldIndexer"
    fake.SingleFieldIndexer = SingleFieldIndexer

    def pickled(data: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> bytes:
        with monkeypatch.context() as patch:
            for name in ("petastorm", "petastorm.etl"):
                patch.setitem(sys.modules, name, types.ModuleType(name))
            patch.setitem(sys.modules, fake.__name__, fake)
            return pickle.dumps({"by id": SingleFieldIndexer(data)}, protocol)

    return pickled


def by_value() -> Any:
    """Ten ids a row group."""
    data: Any = defaultdict(set)
    for row in range(40):
        data[np.int64(row)].add(row // 10)
    return data


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Path]:
    def write(index: bytes | None, counted: Any = None) -> Path:
        table = pa.table({"id": pa.array(range(40), pa.int64())})
        root = tmp_path / "data"
        root.mkdir()
        for number in range(2):
            pq.write_table(table.slice(20 * number, 20), root / f"part-{number}.parquet", row_group_size=10)
        metadata = {COUNTED: json.dumps(counted or {"part-0.parquet": 2, "part-1.parquet": 2}).encode()}
        pq.write_metadata(
            table.schema.with_metadata(metadata | ({} if index is None else {INDEX_KEY: index})),
            root / "_common_metadata",
        )
        return root

    return write


def selected(root: Path, selector: Any, **arguments: Any) -> list[int]:
    loader = ParquetLoader(root, 40, rowgroup_selector=selector, shuffle=False, **arguments)
    return [int(row) for batch in loader for row in batch["id"]]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_of_any_pickles_protocol_selects_whole_row_groups(
    indexer: Callable[..., bytes], dataset: Callable[..., Path], protocol: int
) -> None:
    root = dataset(indexer(by_value(), protocol))
    assert selected(root, SingleIndexSelector("by id", [12, np.int32(38)])) == [*range(10, 20), *range(30, 40)]


def test_selectors_are_joined(indexer: Callable[..., bytes], dataset: Callable[..., Path]) -> None:
    root = dataset(indexer(by_value()))
    one, other = SingleIndexSelector("by id", [2, 12]), SingleIndexSelector("by id", [15, 25])
    assert selected(root, IntersectIndexSelector([one, other])) == list(range(10, 20))
    assert selected(root, UnionIndexSelector([one, other])) == list(range(30))
    nested = IntersectIndexSelector([UnionIndexSelector([one, other]), SingleIndexSelector("by id", [5])])
    assert selected(root, nested) == list(range(10))


def test_a_selector_of_the_users_own_is_asked(indexer: Callable[..., bytes], dataset: Callable[..., Path]) -> None:
    class Many(RowGroupSelectorBase):
        def get_index_names(self) -> list[str]:
            return ["by id"]

        def select_row_groups(self, index_dict: Any) -> set[int]:
            index = index_dict["by id"]
            assert len(index.indexed_values) == 40
            return {number for value in (1, 39) for number in index.get_row_group_indexes(value)}

    assert selected(dataset(indexer(by_value())), Many()) == [*range(10), *range(30, 40)]


def test_a_saved_position_belongs_to_the_row_groups_that_were_selected(
    indexer: Callable[..., bytes], dataset: Callable[..., Path]
) -> None:
    root = dataset(indexer(by_value()))
    one, other = (ParquetLoader(root, 4, rowgroup_selector=SingleIndexSelector("by id", [value])) for value in (2, 12))
    assert one.rows_total == other.rows_total == 10
    assert one.manifest.fingerprint != other.manifest.fingerprint
    with pytest.raises(DataError, match="the dataset has changed since the state was saved"):
        other.load_state_dict(one.state_dict())


def test_no_row_group_is_a_warning(indexer: Callable[..., bytes], dataset: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning, match="rowgroup_selector= left none of its 40 rows"):
        assert selected(dataset(indexer(by_value())), SingleIndexSelector("by id", ["no such value"])) == []


def test_what_does_not_fit_is_refused(indexer: Callable[..., bytes], dataset: Callable[..., Path]) -> None:
    root = dataset(indexer(by_value()))
    with pytest.raises(ValueError, match=r"has no index 'by car', only by id"):
        selected(root, SingleIndexSelector("by car", [1]))
    with pytest.raises(
        ValueError, match=r"rowgroup_selector must be one of spark_elastic\.data\.selectors, not 'by id'"
    ):
        selected(root, "by id")
    files, selector = [root / "part-0.parquet", root / "part-1.parquet"], SingleIndexSelector("by id", [1])
    with pytest.raises(ValueError, match="rowgroup_selector= needs one URL"):
        ParquetLoader(files, 4, rowgroup_selector=selector)
    with pytest.raises(ValueError, match="values_list must be several values, not the string 'car 1'"):
        SingleIndexSelector("by id", "car 1")
    with pytest.raises(ValueError, match="UnionIndexSelector needs at least one selector"):
        UnionIndexSelector([])


def test_a_dataset_without_an_index_says_what_makes_one(dataset: Callable[..., Path]) -> None:
    with pytest.raises(
        DataError, match=r"has no index of its row groups, which Petastorm's build_rowgroup_index makes"
    ):
        selected(dataset(None), SingleIndexSelector("by id", [1]))


def test_an_index_of_other_files_is_refused(indexer: Callable[..., bytes], dataset: Callable[..., Path]) -> None:
    root = dataset(indexer(by_value()), {"part-0.parquet": 2, "part-2.parquet": 2})
    with pytest.raises(DataError, match="has other row groups than its index"):
        selected(root, SingleIndexSelector("by id", [1]))


def test_an_index_of_more_row_groups_is_refused(indexer: Callable[..., bytes], dataset: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="has other row groups than its index"):
        selected(dataset(indexer({1: {0, 9}})), SingleIndexSelector("by id", [1]))


def test_of_row_groups_at_the_end_that_no_index_has_there_is_a_warning(
    indexer: Callable[..., bytes], dataset: Callable[..., Path]
) -> None:
    with pytest.warns(UserWarning, match="no index has row groups from number 3 on, of 4"):
        assert selected(dataset(indexer({1: {0, 2}})), SingleIndexSelector("by id", [1])) == [
            *range(10),
            *range(20, 30),
        ]


TIMES = [np.datetime64("2020-01-02"), np.datetime64("2020-01-02T03:04:05.000006"), np.array(9, ">M8[h]")[()]]


@pytest.mark.parametrize(
    "value", [True, 7, -1.5, "Tromsø", b"bytes", "", np.array(9, ">i4")[()], np.uint64(2**63), *TIMES]
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_values_of_numpy_are_read_as_they_were(indexer: Callable[..., bytes], value: Any, protocol: int) -> None:
    given = np.asarray(value)[()]
    (found,) = read_indexes(indexer({given: {0}}, protocol))["by id"].indexed_values
    assert (found, type(found)) == (given, type(given))


@pytest.mark.parametrize("value", [np.datetime64("2020-01-02"), Decimal("1.50")])
def test_row_groups_are_selected_by_a_date_or_decimal(
    indexer: Callable[..., bytes], dataset: Callable[..., Path], value: Any
) -> None:
    root = dataset(indexer({value: {1, 3}, value + 1: {2}}))
    assert selected(root, SingleIndexSelector("by id", [value])) == [*range(10, 20), *range(30, 40)]


def test_a_time_of_no_unit_and_a_decimal_of_no_text_are_refused(indexer: Callable[..., bytes]) -> None:
    day = indexer({np.datetime64("2020-01-02"): {0}}, 4)
    with pytest.raises(DataError, match="a value of a dtype that no index needs"):
        read_indexes(day.replace(b"C\x01D", b"C\x01O"))
    with pytest.raises(DataError, match="a value of a dtype that no index needs"):
        read_indexes(indexer({np.datetime64("2020-01-02", "2D"): {0}}))
    with pytest.raises(DataError, match="it has a Decimal of 1"):
        read_indexes(b"cdecimal\nDecimal\n(I1\ntR.")


@pytest.mark.parametrize("number", [-1, 4, 1.5])
def test_a_selector_of_numbers_that_are_no_row_groups_is_refused(
    indexer: Callable[..., bytes], dataset: Callable[..., Path], number: Any
) -> None:
    class Odd(SingleIndexSelector):
        def select_row_groups(self, index_dict: Any) -> set[int]:
            return {number}

    with pytest.raises(ValueError, match=f"has 4 row groups, and not {number}"):
        selected(dataset(indexer(by_value())), Odd("by id", [1]))


def test_partitions_have_the_types_that_they_have_in_the_whole_dataset(
    indexer: Callable[..., bytes], tmp_path: Path
) -> None:
    for number, key in enumerate(("1", "x")):
        table = pa.table({"id": pa.array([2 * number, 2 * number + 1], pa.int64())})
        (tmp_path / f"k={key}").mkdir()
        pq.write_table(table, tmp_path / f"k={key}" / "part.parquet")
    pq.write_metadata(table.schema.with_metadata({INDEX_KEY: indexer({0: {0}, 2: {1}})}), tmp_path / "_common_metadata")
    selector = SingleIndexSelector("by id", [0])
    assert selected(tmp_path, selector, filters=[("k", "=", "1")], columns=["id"]) == [0, 1]
    loader = ParquetLoader(tmp_path, 2, rowgroup_selector=selector)
    assert set(next(iter(loader))) == {"id"}, "k is text"
    with pytest.raises(ValueError, match="encode the manifest of the whole dataset"):
        loader.manifest.encode()
    with pytest.warns(UserWarning, match="left none"):
        assert selected(tmp_path, SingleIndexSelector("by id", [7]), filters=[("k", "=", "1")]) == []


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps({"x": _Evil()}),
        pickle.dumps({"x": 3}),
        pickle.dumps([1]),
        b"no pickle",
        pickle.dumps({"x": eval}),
        pickle.dumps({"x": np.array([object()])[0]}),
        pickle.dumps(np.dtype([("a", "O")])),
        # An attribute of the class by which indexes are read, set by a pickle.
        b"\x80\x02cpetastorm.etl.rowgroup_indexers\nSingleFieldIndexer\nN}U\x17get_row_group_indexesK\x01s\x86b.",
        b"\x80\x02cpetastorm.etl.rowgroup_indexers\nSingleFieldIndexer\n)\x81}U\x0b_index_dataNsb.",
    ],
)
def test_no_other_pickle_is_taken_for_an_index_or_run(
    pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="index of row groups cannot be read"):
        read_indexes(pickled)
    assert not list(tmp_path.iterdir())
