"""The rows that a reader holds: no more than it needs, and those that the order assigns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
