"""A loader of a few rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keras_networks import ROWS

from spark_elastic.data import ParquetLoader


@pytest.fixture
def make_loader(tmp_path: Path) -> Callable[[], ParquetLoader]:
    values = [float(row) / ROWS for row in range(ROWS)]
    pq.write_table(pa.table({"x": values, "y": values}), tmp_path / "part.parquet")
    return lambda: ParquetLoader(str(tmp_path), global_batch_size=8)


@pytest.fixture
def loader(make_loader: Callable[[], ParquetLoader]) -> ParquetLoader:
    return make_loader()
