"""The rows that a reader holds: no more than it needs, and those that the order assigns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import World, write_dataset
from loaded_rows import ids

from spark_elastic.data import ParquetLoader
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


def test_survivors_do_not_read_again_what_they_hold(dataset: Path) -> None:
    world = World(lambda: ParquetLoader(dataset, 4), 2)
    world.step()
    world.commit()
    store = world.loaders[0]._store
    assert store is not None
    world.form(3, keep=1)
    world.step()
    assert world.loaders[0]._store is store
    assert store.windows_read == len(np.flatnonzero(store.resident >= 0))
    world.close()


def test_lanes_that_moved_away_are_dropped(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, [64] * 8)
    world = World(lambda: ParquetLoader(root, 8), 1)
    world.step()
    world.commit()
    store = world.loaders[0]._store
    assert store is not None
    assert (store.resident >= 0).sum() == 8
    world.form(4, keep=1)
    world.step()
    assert (store.resident >= 0).sum() == 2
    world.close()


@pytest.mark.parametrize("kind", [pa.list_(pa.float32(), 2**15), pa.list_(pa.float32())])
def test_rows_that_files_hold_in_few_bytes_take_no_more_memory_than_others(kind: pa.DataType, tmp_path: Path) -> None:
    """The window was chosen by the bytes in the files: 8 GiB for one-hot vectors of 128 KiB, however few there were."""
    count, width = 64, 2**15
    one_hot = np.zeros((count, width), np.float32)
    one_hot[:, 7] = 1
    rows = pa.FixedSizeListArray.from_arrays(one_hot.reshape(-1), width).cast(kind)
    pq.write_table(pa.table({"x": rows}), tmp_path / "rows.parquet", row_group_size=8)
    loader = ParquetLoader(tmp_path, 8)
    spec = loader._own_spec
    assert 2**27 < spec.lanes * spec.window * one_hot[0].nbytes <= 2**28
    assert sum(float(batch["x"][:, 7].sum()) for batch in loader) == count
    assert loader._store is not None
    assert loader._store.bytes <= 2 * one_hot.nbytes


def test_an_engine_that_delivers_other_rows_than_were_assigned_is_an_error(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_elastic.data.arrow_engine import ArrowEngine
    from spark_elastic.data.columns import Rows

    read = ArrowEngine.read

    def swapped(self: ArrowEngine, *args: Any) -> Any:
        for rows in read(self, *args):
            yield Rows(rows.group, rows.index[::-1], rows.number, rows.columns)

    monkeypatch.setattr(ArrowEngine, "read", swapped)
    with pytest.raises(DataError, match="rows delivered are not the rows assigned"):
        ids(ParquetLoader(dataset, 16))


def test_rows_that_are_mixed_up_on_their_way_into_a_batch_are_an_error(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_elastic.data.window import WindowStore

    load = WindowStore.load

    def mixed_up(self: WindowStore, lane: int, window: int) -> None:
        load(self, lane, window)
        self._base[lane] ^= 1

    monkeypatch.setattr(WindowStore, "load", mixed_up)
    with pytest.raises(DataError, match="rows delivered are not the rows assigned"):
        ids(ParquetLoader(dataset, 16))


def test_a_huge_row_group_is_not_held_whole(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, [200_000], files=1)
    loader = ParquetLoader(root, 64, shuffle_rows=4096)
    iterator = iter(loader)
    for _ in range(100):
        next(iterator)
    assert loader._store is not None
    assert loader._store.bytes <= 4096 * 16 * 1.01
    assert loader._chunk * 16 <= 4 * 2**20
    loader.close()
