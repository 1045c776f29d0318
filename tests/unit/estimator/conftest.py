"""Datasets for fits in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fit_plans import write_line


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """y = 2 x in 100 rows, with weights."""
    return write_line(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def weigh(tmp_path: Path) -> Any:
    """Write 20 rows with these weights."""

    def write(name: str, weights: list[float]) -> str:
        x = np.linspace(-1, 1, len(weights))
        pq.write_table(pa.table({"x": x, "y": 2 * x, "w": weights}), tmp_path / f"{name}.parquet")
        return (tmp_path / f"{name}.parquet").as_uri()

    return write
