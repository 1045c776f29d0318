"""What loaders deliver, as plain lists, and small datasets for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from spark_elastic.data import ParquetLoader


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


def items(loader: Any) -> list[int]:
    return [int(item) for batch in loader for item in batch]


def table_of(*columns: tuple[str, Any]) -> pa.Table:
    return pa.table(dict(columns))


def batch_of(tmp_path: Path, table: pa.Table, **options: Any) -> dict[str, torch.Tensor]:
    """Return the whole table as one batch in its order."""
    pq.write_table(table, tmp_path / "one.parquet")
    (batch,) = ParquetLoader(tmp_path / "one.parquet", 1000, shuffle=False, **options)
    return batch


class Numbers(Dataset[int]):
    """Item i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index >= self.count:
            raise IndexError(index)
        return index
