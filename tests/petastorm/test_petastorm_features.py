"""What Petastorm's readers offer and ours has under the same names, row by row against Petastorm's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("petastorm")

from petastorm import make_batch_reader
from petastorm_datasets import reading, write_drive

from spark_elastic.data import ParquetLoader

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drive(tmp_path_factory.mktemp("drive") / "data")


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


def test_a_list_of_files_is_read_in_the_same_order(drive: Path) -> None:
    files = [drive / "part-1.parquet", drive / "part-0.parquet"]
    with reading(files, make_batch_reader, schema_fields=["id", "speed"]) as reader:
        expected = [int(row) for batch in reader for row in batch.id]
    assert ids(ParquetLoader(files, 8, columns=["id", "speed"], shuffle=False)) == expected


@pytest.mark.parametrize("patterns", [["id|half"], ["s.*", "id"], ["p.s.", "i.?"], [".*e"]])
def test_patterns_choose_the_fields_that_they_choose_in_petastorm(drive: Path, patterns: list[str]) -> None:
    with reading(drive, schema_fields=patterns) as reader:
        expected = set(reader.schema.fields)
    columns = [re.compile(pattern) for pattern in patterns]
    (first, *_) = ParquetLoader(drive, 4, columns=columns, shuffle=False, filters=[("id", "<", 4)])
    assert set(first) == expected
