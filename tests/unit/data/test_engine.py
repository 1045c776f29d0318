"""The table of engines, which is all that a loader knows of them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from loaded_rows import ids

from spark_elastic.data import ParquetLoader
from spark_elastic.data.columns import Rows
from spark_elastic.data.engine import ENGINES, Reading


class Counting:
    """An engine whose id is the number of the row group, times 1000, and the row in it."""

    row_bytes = 8.0

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        for first in range(start, stop, chunk):
            index = np.arange(first, min(first + chunk, stop), dtype=np.int64)
            yield Rows(group, index, index, {"id": group * 1000 + index})

    def expect(self, group: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_line_in_the_table_is_enough_for_another_engine(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counting] = []

    def open_engine(reading: Reading) -> Counting:
        made.append(Counting(reading))
        return made[-1]

    module = types.ModuleType("counting_engine")
    module.open_engine = open_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "counting_engine", module)
    monkeypatch.setitem(ENGINES, "counting", "counting_engine")  # type: ignore[arg-type]
    loader = ParquetLoader(dataset, 16, engine="counting", shuffle=False, engine_options={"depth": 3}, columns=["id"])
    assert ids(loader) == [
        1000 * number + row for number, group in enumerate(loader.manifest) for row in range(group.rows)
    ]
    assert [(each.reading.options, each.reading.columns) for each in made] == [({"depth": 3}, ["id"])]
