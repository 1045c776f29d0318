"""Files that change after a dataset was listed, or while it is read, are named."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch
from data_worlds import make_table, write_dataset

from spark_elastic.data import ParquetLoader, source
from spark_elastic.data.filesystem import Location
from spark_elastic.data.manifest import read_manifest
from spark_elastic.data.source import Source
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def other_data(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(make_table(np.arange(len(table)) + 5000), path, row_group_size=100)


def other_schema(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["id", "y"]), path, row_group_size=100)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "the file is gone"),
        (truncate, "cannot be read"),
        (other_data, "has changed since the dataset was listed"),
        (other_schema, "has changed since the dataset was listed"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
    ],
)
@pytest.mark.parametrize("after", [0, 2])
def test_a_damaged_file_is_named_at_the_batch_that_needs_it(
    tmp_path: Path, damage: Any, message: str, after: int
) -> None:
    root = write_dataset(tmp_path / "data", [500] * 40, files=40)
    loader = ParquetLoader(root, 16, prefetch=1, shuffle_rows=512)
    iterator = iter(loader)
    for _ in range(after):
        next(iterator)
    order = loader.tracker.order
    group = int(order.groups[-1])
    path = root / loader.manifest[group].path
    damage(path)
    with pytest.raises(DataError, match=path.name) as failure:
        for _ in iterator:
            pass
    assert message in str(failure.value)
    loader.close()


def test_a_file_with_the_same_rows_in_another_order_is_another_file(tmp_path: Path) -> None:
    """Its length and its footer, which has the least and the largest value, are the same."""
    values = np.random.default_rng(0).random(1000)
    pq.write_table(pa.table({"x": values}), tmp_path / "p.parquet")
    before = ParquetLoader(tmp_path, 16)
    state, listed = before.state_dict(), before.manifest
    pq.write_table(pa.table({"x": np.random.default_rng(1).permutation(values)}), tmp_path / "p.parquet")
    after = ParquetLoader(tmp_path, 16)
    assert after.manifest.fingerprint == listed.fingerprint
    with pytest.raises(DataError, match="the dataset has changed since the state was saved: content was"):
        after.load_state_dict(state)
    with pytest.raises(DataError, match=r"p\.parquet has changed since the dataset was listed"):
        next(iter(before))
    del state["content"]  # as an earlier release saved it
    after.load_state_dict(state)


def write_plainly(path: Path, first: int) -> None:
    """Write 200,000 rows to a file whose length and footer do not depend on their values."""
    table = pa.table({"id": np.arange(first, first + 200_000)})
    pq.write_table(table, path, row_group_size=20_000, compression="none", use_dictionary=False, write_statistics=False)


def all_below(limit: int, batches: Iterable[Mapping[str, torch.Tensor]]) -> None:
    for batch in batches:
        assert batch["id"].max() < limit


ENGINES = [
    "arrow",
    pytest.param(
        "petastorm",
        marks=[
            pytest.mark.skipif(find_spec("petastorm") is None, reason="needs petastorm"),
            pytest.mark.filterwarnings("ignore"),
        ],
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_is_rewritten_in_place_while_it_is_read_is_named(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "a.parquet"
    write_plainly(path, 0)
    os.utime(path, (0, 0))
    with contextlib.closing(ParquetLoader(path, 1000, shuffle=False, prefetch=1, engine=engine)) as loader:
        batches = iter(loader)
        next(batches)
        write_plainly(path, 1_000_000)
        with pytest.raises(DataError, match=r"a\.parquet has been written to since it was opened"):
            all_below(1_000_000, batches)


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_whose_versions_tell_nothing_is_read(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several web servers may have versions of their own for one file, or refuse to tell."""
    versions = itertools.count()

    def told(filesystem: pafs.FileSystem, path: str) -> tuple[object, ...]:
        version = next(versions)
        if fails and version:
            raise FileNotFoundError(path)
        return (version,)

    monkeypatch.setattr(source, "_stamp_of_object", told)
    root = write_dataset(tmp_path / "data", [100, 100], files=1)
    manifest = read_manifest(root)
    with Source(manifest, [Location(pafs.LocalFileSystem(), str(root), local=False)]) as files:
        for group in range(2):
            files.check(group)
            assert sum(batch.num_rows for batch in files.batches(group, ["id"], 30)) == manifest[group].rows
    assert next(versions) > 2
