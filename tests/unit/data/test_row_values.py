"""The rows of a table as predicates get them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loaded_rows import ids

from spark_elastic.data import ParquetLoader
from spark_elastic.data.predicates import PredicateBase, in_lambda
from spark_elastic.data.row_values import row_values
from spark_elastic.errors import DataError


def test_nulls_strings_and_times_come_as_documented(tmp_path: Path) -> None:
    columns = {
        "id": pa.array([0, 1, 2]),
        "half": pa.array([0.5, None, 2.5]),
        "count": pa.array([1, None, 3], pa.int32()),
        "name": pa.array(["a", None, "c"]),
        "time": pa.array([0, None, 2], pa.timestamp("us")),
        "list": pa.array([[1, 2], None, [3, 4]]),
    }
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    seen: dict[int, dict[str, Any]] = {}

    class See(PredicateBase):
        def get_fields(self) -> set[str]:
            return set(columns)

        def do_include(self, values: Any) -> bool:
            seen[int(values["id"])] = dict(values)
            return values["count"] is not None

    assert ids(ParquetLoader(tmp_path, 2, columns=["id"], predicate=See(), shuffle=False)) == [0, 2]
    assert np.isnan(seen[1]["half"])
    assert [seen[1][name] for name in ("count", "name", "time", "list")] == [None] * 4
    assert (seen[0]["half"], seen[0]["count"], seen[0]["name"]) == (0.5, 1, "a")
    assert seen[2]["time"] == np.datetime64(2000, "ns")
    assert str(seen[0]["time"]) == "1970-01-01T00:00:00.000000000"
    assert seen[2]["list"].tolist() == [3, 4]


def test_a_predicate_is_given_tensors_in_their_logical_order_and_none_for_a_null() -> None:
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 2], permutation=[1, 0])
    stored = pa.array([[1, 2, 3, 4], None, [5, 6, 7, 8]], pa.list_(pa.int64(), 4))
    table = pa.table({"x": pa.ExtensionArray.from_storage(kind, stored)})
    first, null, last = (row["x"] for row in row_values(table, "here"))
    assert (first.tolist(), null, last.tolist()) == ([[1, 3], [2, 4]], None, [[5, 7], [6, 8]])


def test_a_struct_of_data_and_shape_that_is_no_array_is_a_dict() -> None:
    image = {"data": b"xx", "shape": [1, 2]}
    assert list(row_values(pa.table({"image": [image, None]}), "here")) == [{"image": image}, {"image": None}]


def test_a_time_beyond_nanoseconds_names_its_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"until": pa.array([datetime.datetime(9999, 12, 31)])}), tmp_path / "p.parquet")
    with pytest.raises(
        DataError, match=r"row group 0: column 'until' cannot be given to a predicate, whose datetime64\[ns\] reach"
    ):
        ParquetLoader(tmp_path, 2, predicate=in_lambda(["until"], lambda until: True), transform=lambda table: {})
