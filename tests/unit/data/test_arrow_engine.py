"""The default engine: which columns it reads."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loaded_rows import batch_of, table_of

from spark_elastic.data import ParquetLoader
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


def test_strings_are_left_out_and_refused_when_named(tmp_path: Path) -> None:
    table = table_of(("id", pa.array([1, 2])), ("s", pa.array(["a", "bc"])))
    assert set(batch_of(tmp_path, table)) == {"id"}
    with pytest.raises(ValueError, match="'s' is string, which cannot be made into a tensor"):
        batch_of(tmp_path, table, columns=["id", "s"])
    with pytest.raises(ValueError, match="'nope' is not in the dataset, which has id, s"):
        batch_of(tmp_path, table, columns=["nope"])


def test_columns_chooses_what_is_read(tmp_path: Path) -> None:
    table = table_of(("a", [1]), ("b", [2]), ("c", [3]))
    assert set(batch_of(tmp_path, table, columns=["c", "a", "c"])) == {"a", "c"}
    assert set(batch_of(tmp_path, table, columns=[], with_row_ids=True)) == {"_row_group", "_row"}
    with pytest.raises(ValueError, match=r"columns=\[\] names no column"):
        batch_of(tmp_path, table, columns=[])
    with pytest.raises(ValueError, match=r"no column of .*one.parquet has numbers \(\['s'\]\)"):
        batch_of(tmp_path, table_of(("s", ["x"])))


def test_two_columns_of_one_name_are_refused_unless_neither_is_read(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], names=["a", "a", "b"])
    pq.write_table(table, tmp_path / "0.parquet")
    for columns in (None, ["a"], [re.compile("a")]):
        with pytest.raises(DataError, match=f"{tmp_path}: the files have several columns named 'a'; choose others"):
            ParquetLoader(tmp_path, 2, columns=columns)
    assert [sorted(batch["b"].tolist()) for batch in ParquetLoader(tmp_path, 2, columns=["b"])] == [[5, 6]]
