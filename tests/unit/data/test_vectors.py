"""Spark ML's vectors, dense and sparse, become lists."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loaded_rows import table_of

from spark_elastic.data import ParquetLoader

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")

SPARK_VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def test_spark_vectors_are_lists_with_all_their_zeros(tmp_path: Path) -> None:
    def vectors(rows: list[list[float]]) -> pa.Array:
        dense = [{"type": 1, "size": None, "indices": None, "values": row} for row in rows]
        places = [[place for place, value in enumerate(row) if value] for row in rows]
        sparse = [
            {"type": 0, "size": len(row), "indices": found, "values": [row[place] for place in found]}
            for row, found in zip(rows, places, strict=True)
        ]
        either = [dense[row] if row % 3 == 0 else sparse[row] for row in range(len(rows))]
        return pa.array(either, SPARK_VECTOR)

    even = [[float(i), 0.0, i % 2 * 0.5, 0.0] for i in range(300)]
    odd = [[0.0, float(i)] * (i % 4) for i in range(300)]
    table = table_of(("id", pa.array(range(300))), ("even", vectors(even)), ("odd", vectors(odd)))
    pq.write_table(table, tmp_path / "vectors.parquet", row_group_size=37)
    for batch in ParquetLoader(tmp_path / "vectors.parquet", 16):
        rows = batch["id"].tolist()
        assert batch["even"].tolist() == [even[row] for row in rows]
        assert [values.tolist() for values in batch["odd"].unbind()] == [odd[row] for row in rows]
