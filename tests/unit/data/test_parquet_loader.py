from __future__ import annotations

import collections
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from data_worlds import BRIEF, World, make_table, write_dataset
from hypothesis import given
from hypothesis import strategies as st
from loaded_rows import batch_of, ids, table_of

from spark_elastic.data import ElasticDataLoader, ParquetLoader, read_manifest
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")

# -- one process -------------------------------------------------------------------------------------------------------


def test_an_epoch_holds_every_row_once_in_an_order_of_its_own(dataset: Path) -> None:
    loader = ParquetLoader(str(dataset), 16)
    first = ids(loader)
    assert sorted(first) == list(range(203))
    assert first != sorted(first)
    assert ids(loader) == first, "outside a state every iter() starts at row 0"
    loader.set_epoch(1)
    second = ids(loader)
    assert sorted(second) == list(range(203))
    assert second != first


def test_a_loader_that_is_being_iterated_can_be_pickled(dataset: Path) -> None:
    """Such as one at a script's top level, whose first batch was looked at, and that the training function uses."""
    loader = ParquetLoader(dataset, 16)
    iterator = iter(loader)
    begun = next(iterator)["id"].tolist()
    copied = pickle.loads(pickle.dumps(loader))
    assert begun + [number for batch in iterator for number in batch["id"].tolist()] == ids(copied)


def test_unshuffled_rows_come_in_the_order_of_the_files(dataset: Path) -> None:
    assert ids(ParquetLoader(dataset, 16, shuffle=False)) == list(range(203))


@pytest.mark.parametrize("shuffle_rows", [0, 1, 64, 1000])
def test_any_window_gives_every_row_once(dataset: Path, shuffle_rows: int) -> None:
    assert sorted(ids(ParquetLoader(dataset, 16, shuffle_rows=shuffle_rows))) == list(range(203))


def test_batches_are_dicts_of_tensors_with_the_rows_values(dataset: Path) -> None:
    batch = next(iter(ParquetLoader(dataset, 16)))
    assert set(batch) == {"id", "x"}
    assert batch["id"].dtype == torch.int64
    assert batch["x"].dtype == torch.float32
    assert batch["x"].shape == (16, 2)
    assert torch.equal(batch["x"][:, 1], batch["id"].float() + 0.5)


def test_row_ids_name_the_row_group_and_the_row_in_it(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    starts = np.cumsum([0, *[group.rows for group in manifest]])
    for batch in ParquetLoader(dataset, 16, with_row_ids=True):
        assert batch["_row_group"].dtype == batch["_row"].dtype == torch.int64
        assert (starts[batch["_row_group"]] + batch["_row"].numpy()).tolist() == batch["id"].tolist()


def test_a_filter_that_passes_nothing_gives_an_empty_epoch(dataset: Path) -> None:
    with pytest.warns(UserWarning, match="filters= left none of its 203 rows"):
        loader = ParquetLoader(dataset, 16, filters=[("id", "<", 0)])
    assert (len(loader), list(loader), list(loader)) == (0, [], [])
    loader.set_world(0, 2)
    assert (list(loader), list(loader)) == ([], [])


def test_one_file_is_a_dataset(dataset: Path) -> None:
    assert sorted(ids(ParquetLoader(dataset / "part-0.parquet", 16))) == list(range(31))


# -- worlds ------------------------------------------------------------------------------------------------------------


schedules = st.lists(
    st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 8), st.integers(0, 8)), min_size=0, max_size=5
)
group_sizes = st.lists(st.one_of(st.sampled_from([0, 1, 1]), st.integers(2, 40), st.just(120)), min_size=1, max_size=7)


@pytest.mark.parametrize(("fixed", "balanced"), [(True, False), (True, True), (False, False)])
@BRIEF
@given(
    groups=group_sizes,
    batch=st.sampled_from([2, 7, 16, 64]),
    size=st.integers(1, 8),
    schedule=schedules,
    window=st.sampled_from([None, 0, 70, 300]),
    shuffle=st.sampled_from([True, True, False]),
)
def test_every_row_counts_once_an_epoch_through_any_schedule_of_resets(
    tmp_path_factory: pytest.TempPathFactory,
    fixed: bool,
    balanced: bool,
    groups: list[int],
    batch: int,
    size: int,
    schedule: list[tuple[int, bool, int, int]],
    window: int | None,
    shuffle: bool,
) -> None:
    root = write_dataset(tmp_path_factory.mktemp("world"), groups)
    sizes = {"global_batch_size": batch} if fixed else {"batch_size": batch}

    def make() -> ParquetLoader:
        return ParquetLoader(root, shuffle_rows=window, shuffle=shuffle, seed=batch, prefetch=4, **sizes)

    world = World(make, size)
    world.same_steps, world.chance = fixed, random.Random(batch) if balanced else None
    total = sum(groups)
    resets = collections.deque(schedule)
    for epoch in range(2):
        while True:
            for _ in range(resets[0][0] if resets else total + 1):
                if world.step() is None:
                    break
                if not resets or resets[0][1]:
                    world.commit()
            if not resets:
                break
            _, _, new_size, survivors = resets.popleft()
            world.form(new_size, survivors)
        if not epoch:
            resets.extend(schedule[:2])
            for loader in world.loaders:
                loader.set_epoch(1)
            world.commit()
            world.iterators = [iter(loader) for loader in world.loaders]
    world.close()
    assert world.counted == collections.Counter({(epoch, row): 1 for epoch in range(2) for row in range(total)})


def test_the_same_steps_hold_the_same_rows_at_every_world_size(dataset: Path) -> None:
    steps = []
    for size in range(1, 9):
        world = World(lambda: ParquetLoader(dataset, global_batch_size=24, seed=3), size)
        while world.step():
            world.commit()
        steps.append(world.steps)
    assert all(found == steps[0] for found in steps)
    assert [len(step) for step in steps[0].values()] == [24] * 7 + [35]


@pytest.mark.parametrize(
    "draw", [lambda: np.random.rand(), lambda: torch.rand(1), lambda: random.random(), np.random.default_rng(0).random]
)
def test_with_shards_a_transform_that_draws_random_numbers_is_refused(dataset: Path, draw: Callable[[], Any]) -> None:
    """It gets as many rows at a time as its rank reads, so that the same row would get other numbers in another world."""

    def transform(table: pa.Table) -> pa.Table:
        draw()
        return table

    def batches(**options: Any) -> int:
        return len(list(ParquetLoader(dataset, global_batch_size=8, transform=transform, columns=["id"], **options)))

    assert batches() > 0
    pickle.dumps(ParquetLoader(dataset, global_batch_size=8, transform=pc.add, shards=4))
    with pytest.raises(DataError, match=r"^transform= draws random numbers, and with shards="):
        batches(shards=4)


def test_fewer_rows_than_ranks_leave_some_with_a_repeated_batch_of_weight_zero(tmp_path: Path) -> None:
    world = World(lambda: ParquetLoader(write_dataset(tmp_path, [2, 1]), 4), 8)
    assert sorted(world.step() or []) == [0] * 5 + [1] * 3
    assert world.step() is None
    world.commit()
    assert sorted(world.counted) == [(0, 0), (0, 1), (0, 2)]


# -- columns -----------------------------------------------------------------------------------------------------------


def test_lists_whose_lengths_only_look_equal_in_the_footers_are_read_too(tmp_path: Path) -> None:
    lists = [[float(i)] * (i % 3 + 1) for i in range(300)]
    table = table_of(("id", pa.array(range(300))), ("v", pa.array(lists)))
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=30)
    assert dict(read_manifest(tmp_path / "lists.parquet").list_lengths) == {"v": 2}
    for batch in ParquetLoader(tmp_path / "lists.parquet", 16):
        for row, values in zip(batch["id"].tolist(), batch["v"].unbind(), strict=True):
            assert values.tolist() == lists[row]


def test_row_groups_whose_lists_have_different_lengths_can_be_mixed(tmp_path: Path) -> None:
    lists = [[float(i)] * (1 + i // 30) for i in range(300)]
    table = table_of(("id", pa.array(range(300))), ("v", pa.array(lists)))
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=30)
    seen = []
    for batch in ParquetLoader(tmp_path / "lists.parquet", 16):
        for row, values in zip(batch["id"].tolist(), batch["v"].unbind(), strict=True):
            assert values.tolist() == lists[row]
            seen.append(row)
    assert sorted(seen) == list(range(300))


def test_row_ids_take_no_columns_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="with_row_ids=True adds a column '_row', and there is one"):
        batch_of(tmp_path, table_of(("v", [1, 2]), ("_row", [7, 8])), with_row_ids=True)


# -- filters and partitions --------------------------------------------------------------------------------------------


def test_hive_partitions_are_columns(tmp_path: Path) -> None:
    for year, name in ((2023, "a"), (2024, "b c")):
        folder = tmp_path / f"year={year}" / f"name={name.replace(' ', '%20')}"
        folder.mkdir(parents=True)
        pq.write_table(make_table(np.arange(year, year + 5)), folder / "p.parquet")
    manifest = read_manifest(tmp_path)
    assert [group.partition for group in manifest] == [
        (("year", "2023"), ("name", "a")),
        (("year", "2024"), ("name", "b c")),
    ]
    batches = list(ParquetLoader(tmp_path, 4))
    assert set(batches[0]) == {"id", "x", "year"}
    assert all(
        year in (row, row - 1, row - 2, row - 3, row - 4)
        for b in batches
        for year, row in zip(b["year"], b["id"], strict=True)
    )
    assert sorted(ids(ParquetLoader(tmp_path, 4, filters=[("year", "=", 2024)]))) == list(range(2024, 2029))
    assert sorted(ids(ParquetLoader(tmp_path, 4, filters=[("name", "=", "a")]))) == list(range(2023, 2028))


def test_a_column_that_is_a_hive_partition_and_in_the_files_is_read_from_the_files(tmp_path: Path) -> None:
    (tmp_path / "id=7").mkdir()
    pq.write_table(make_table(np.arange(5)), tmp_path / "id=7" / "p.parquet")
    assert sorted(ids(ParquetLoader(tmp_path, 4))) == list(range(5))
    assert sorted(ids(ParquetLoader(tmp_path, 4, filters=[("id", "<", 3)]))) == [0, 1, 2]


# -- files and arguments -----------------------------------------------------------------------------------------------


def test_files_that_differ_in_their_columns_are_named(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, [10, 10])
    pq.write_table(pa.table({"id": pa.array([1.5]), "x": [[1.0]]}), root / "z.parquet")
    with pytest.raises(DataError, match=r"z\.parquet has another schema than .*part-0\.parquet: column 'id' is double"):
        ParquetLoader(root, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number from 1 on, not 0"),
        ({"batch_size": True}, "batch_size must be a whole number from 1 on, not True"),
        ({"batch_size": np.float64(2)}, "batch_size must be a whole number from 1 on"),
        ({"batch_size": 1, "global_batch_size": 1}, "exactly one"),
        ({"batch_size": 1, "prefetch": 0}, "prefetch must be a whole number from 1 on, not 0"),
        ({"batch_size": 1, "engine": "duckdb"}, "engine must be one of arrow, petastorm, not 'duckdb'"),
        ({"batch_size": 1, "seed": -1}, "seed must be a whole number from 0 on, not -1"),
        ({"batch_size": 1, "seed": "x"}, "seed must be a whole number from 0 on, not 'x'"),
        ({"batch_size": 1, "seed": 1.5}, "seed must be a whole number from 0 on, not 1.5"),
        ({"batch_size": 1, "transform": 3}, "transform must be callable, not 3"),
        ({"batch_size": 1, "shard": (3, 3)}, "rank=3 must be from 0 and below size=3"),
    ],
)
def test_wrong_arguments_are_named(dataset: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError if "transform" in arguments else ValueError, match=message.replace("(", r"\(")):
        ParquetLoader(dataset, **arguments)


@pytest.mark.parametrize("name", ["shuffle", "drop_last"])
def test_what_is_neither_true_nor_false_is_refused(dataset: Path, name: str) -> None:
    wrong: dict[str, Any] = {name: "no"}
    with pytest.raises(TypeError, match=f"{name} must be True or False, not 'no'"):
        ParquetLoader(dataset, 16, **wrong)
    with pytest.raises(TypeError, match=f"{name} must be True or False, not 'no'"):
        ElasticDataLoader([1, 2], 1, **wrong)
    right: dict[str, Any] = {name: np.bool_(False)}
    assert len(ParquetLoader(dataset, 16, **right)) == 13
