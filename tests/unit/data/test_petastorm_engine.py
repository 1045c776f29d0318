"""Petastorm's own reader workers under our order; skipped where Petastorm is not installed."""

from __future__ import annotations

import collections
import contextlib
import operator
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_worlds import World, make_table, write_dataset
from reader_pools import POOLS, nothing_left

petastorm = pytest.importorskip("petastorm")

from petastorm.transform import TransformSpec  # noqa: E402

from spark_elastic.data import ParquetLoader  # noqa: E402
from spark_elastic.errors import DataError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    with nothing_left():
        yield


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


@pytest.mark.parametrize("options", POOLS[:2])
def test_every_row_counts_once_through_resets(tmp_path: Path, options: dict[str, Any]) -> None:
    root = write_dataset(tmp_path / "d", [30, 1, 57, 12, 100, 3], files=3)
    world = World(
        lambda: ParquetLoader(
            root, global_batch_size=24, engine="petastorm", engine_options=options, columns=["id", "x"]
        ),
        3,
    )
    world.same_steps = True
    for size, survivors in ((2, 1), (4, 2), (1, 0)):
        world.step()
        world.commit()
        world.step()
        world.form(size, survivors)
    while world.step():
        world.commit()
    world.close()
    assert world.counted == collections.Counter({(0, row): 1 for row in range(203)})


def test_rows_come_in_the_same_order_from_both_engines(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 1, 57, 12, 100, 3], files=3)
    assert ids(ParquetLoader(root, 16, engine="petastorm")) == ids(ParquetLoader(root, 16))


def test_a_transform_spec_that_drops_rows_is_an_error(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30])
    spec = TransformSpec(lambda frame: frame[frame.id > 3])
    with pytest.raises(DataError, match="Petastorm delivered 26 rows of 30"):
        ids(ParquetLoader(root, 16, engine="petastorm", transform=spec))


@pytest.mark.parametrize("options", POOLS)
def test_an_error_in_a_worker_names_the_row_group(tmp_path: Path, options: dict[str, Any]) -> None:
    root = write_dataset(tmp_path / "d", [30], files=1)
    spec = TransformSpec(operator.itemgetter("nowhere"))
    with pytest.raises(DataError, match=r"part-0\.parquet, row group 0: KeyError: 'nowhere'"):
        ids(ParquetLoader(root, 16, engine="petastorm", engine_options=options, transform=spec))


def test_a_file_that_was_replaced_is_named(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 30])
    loader = ParquetLoader(root, 16, engine="petastorm")
    pq.write_table(make_table(np.arange(30) + 7), root / "part-1.parquet")
    with pytest.raises(DataError, match=r"part-1\.parquet has changed since the dataset was listed"):
        ids(loader)


def test_a_file_that_is_replaced_while_it_is_read_is_named(tmp_path: Path) -> None:
    """Petastorm's workers open it anew for each row group."""
    path = write_dataset(tmp_path / "d", [1000] * 10, files=1) / "part-0.parquet"
    with contextlib.closing(ParquetLoader(path, 100, shuffle=False, prefetch=1, engine="petastorm")) as loader:
        batches = iter(loader)
        next(batches)
        other = write_dataset(tmp_path / "other", [999] + [1001] + [1000] * 8, files=1) / "part-0.parquet"
        other.replace(path)
        with pytest.raises(DataError, match=r"part-0\.parquet has changed since the dataset was listed"):
            ids(batches)


def test_filters_pass_the_same_rows_in_both_engines(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 1, 57, 12])
    filters = [[("id", "<", 10)], [("id", ">", 60)]]
    theirs = ParquetLoader(root, 16, engine="petastorm", filters=filters)
    assert theirs.rows_total == 49
    assert ids(theirs) == ids(ParquetLoader(root, 16, filters=filters))


def test_a_local_disk_cache_gives_the_same_rows_the_second_time(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 30])
    cache = {
        "cache_type": "local-disk", "cache_location": str(tmp_path / "cache"), "cache_size_limit": 10**8,
        "cache_row_size_estimate": 100,
    }  # fmt: skip
    loader = ParquetLoader(root, 16, engine="petastorm", engine_options=cache)
    first = ids(loader)
    assert os.listdir(tmp_path / "cache")
    assert ids(loader) == first


def test_wrong_arguments_are_value_errors(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [3])
    with pytest.raises(ValueError, match="takes a petastorm"):
        ParquetLoader(root, 1, engine="petastorm", transform=lambda table: table)
    with pytest.raises(ValueError, match="not nope"):
        ParquetLoader(root, 1, engine="petastorm", engine_options={"nope": 1})
    with pytest.raises(ValueError, match="'nope' is not in the dataset"):
        ParquetLoader(root, 1, engine="petastorm", columns=["nope"])
    with pytest.raises(ValueError, match="engine_options are for engine='petastorm'"):
        ParquetLoader(root, 1, engine_options={"workers_count": 1})


def test_thirty_epochs_of_a_thread_pool_lose_no_row(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [5] * 40, files=8)
    loader = ParquetLoader(root, 16, engine="petastorm", engine_options={"workers_count": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(30):
            loader.set_epoch(epoch)
            assert sorted(ids(loader)) == list(range(200))
