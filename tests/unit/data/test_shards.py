"""Loaders with shards: every row counts once, and each shard has the same rows in every world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_worlds import World, write_dataset

from spark_elastic.data import ElasticDataLoader, ParquetLoader
from spark_elastic.data.plan import BatchPlan
from spark_elastic.data.shards import Cut
from spark_elastic.errors import DataError


def shards_of_steps(loaders: list[ParquetLoader]) -> list[dict[int, list[int]]]:
    """The rows of each shard, step by step, in a world of these ranks."""
    size, found = len(loaders), []
    for rank, loader in enumerate(loaders):
        loader.set_world(rank, size)
    start = 0
    for batches in zip(*loaders, strict=True):
        rows = loaders[0].rows_processed - start
        start += rows
        cut = Cut(8, rows)
        assert loaders[0].batch_rows == cut.rank_rows(size)
        found.append(
            {
                part.shard: batch["id"][part.start : part.stop].tolist()
                for rank, batch in enumerate(batches)
                for part in cut.parts(rank, size)
                if part.weight
            }
        )
    for loader in loaders:
        loader.close()
    return found


def test_a_shard_has_the_same_rows_in_every_world(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "rows", [50, 13, 7, 40])
    worlds = [
        shards_of_steps([ParquetLoader(str(root), global_batch_size=24, shards=8, seed=2) for _ in range(size)])
        for size in (1, 2, 3, 5, 8)
    ]
    assert all(steps == worlds[0] for steps in worlds)
    assert sorted(row for step in worlds[0] for rows in step.values() for row in rows) == list(range(110))


@pytest.mark.parametrize("is_parquet", [True, False])
def test_whole_shards_move_to_the_fast_rank(tmp_path: Path, is_parquet: bool) -> None:
    root = write_dataset(tmp_path / "rows", [50, 13, 7, 41])

    def make() -> Any:
        if is_parquet:
            return ParquetLoader(root, global_batch_size=24, shards=8, balance="auto")
        return _Flat(list(range(111)), global_batch_size=24, shards=8, balance="auto", collate_fn=list)

    world = World(make, 2)
    world.same_steps = True
    assert world.step() == [12, 12]
    world.commit()
    assert [loader.balance([1000, 3000]).after for loader in world.loaders] == [(6, 2), (6, 2)]
    assert world.step() == [18, 6]
    while world.step() is not None:
        pass
    world.commit()
    world.close()
    assert dict(world.counted) == {(0, row): 1 for row in range(111)}


@pytest.mark.parametrize("is_parquet", [True, False])
def test_every_row_counts_once_through_resets_to_worlds_of_other_sizes(tmp_path: Path, is_parquet: bool) -> None:
    root = write_dataset(tmp_path / "rows", [50, 13, 7, 41])

    def make() -> Any:
        if is_parquet:
            return ParquetLoader(str(root), global_batch_size=24, shards=8)
        return _Flat(list(range(111)), global_batch_size=24, shards=8, collate_fn=list)

    world = World(make, 3)
    for size in (1, 8, 2):
        world.step()
        world.commit()
        world.step()
        world.form(size, keep=1)
    while world.step() is not None:
        world.commit()
    assert dict(world.counted) == {(0, row): 1 for row in range(111)}


class _Flat(ElasticDataLoader):
    """Gives the rows of all parts of a batch in one list, as the worlds of the tests compare them."""

    def __iter__(self) -> Any:
        return ([row for part in batch for row in part] for batch in super().__iter__())


def test_a_tail_of_less_than_two_rows_a_shard_joins_the_step_before() -> None:
    plan = BatchPlan(None, 100, shards=24)
    assert plan.next_rows(147, 4) == 147
    assert plan.next_rows(148, 4) == 100
    assert BatchPlan(None, 100).next_rows(147, 4) == 100


def test_lists_whose_form_would_depend_on_the_world_are_refused(tmp_path: Path) -> None:
    def uneven(ids: np.ndarray) -> pa.Array:
        return pa.array([[0.0] * (2 if row < 6 else 1 + 2 * (row % 2)) for row in ids])

    root = write_dataset(tmp_path / "rows", [12], files=1, lists=uneven)
    (batch,) = ParquetLoader(str(root), global_batch_size=12)
    assert batch["lists"].is_nested
    loader = ParquetLoader(str(root), global_batch_size=12, shards=4)
    loader.set_world(0, 1)
    with pytest.raises(DataError, match=r"column 'lists' has lists of several lengths.*transform="):
        next(iter(loader))
    loader.close()
