from __future__ import annotations

import collections
import datetime
import math
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import warnings
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

from spark_elastic.data import ElasticDataLoader, ParquetLoader, read_manifest
from spark_elastic.data.balance import Timing
from spark_elastic.data.filters import RowFilter
from spark_elastic.data.loader import ElasticLoader, PositionedLoader
from spark_elastic.errors import DataError


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Any:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("spark-elastic")] == []


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", [30, 1, 0, 57, 12, 100, 3], files=3)


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


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


def test_lengths_and_counters_follow_the_iteration(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    assert (len(loader), loader.steps_left, loader.rows_total, loader.rows_processed) == (13, 13, 203, 0)
    iterator = iter(loader)
    next(iterator)
    assert (loader.steps_left, loader.rows_processed, loader.batch_rows) == (12, 16, (16,))
    assert len(list(iterator)) == 12
    assert (loader.steps_left, loader.rows_processed, loader.batch_rows) == (0, 203, (11,))
    loader.close()


def test_drop_last_drops_the_tail(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16, drop_last=True)
    assert [len(batch["id"]) for batch in loader] == [16] * 12
    assert len(loader) == 12


def test_row_ids_name_the_row_group_and_the_row_in_it(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    starts = np.cumsum([0, *[group.rows for group in manifest]])
    for batch in ParquetLoader(dataset, 16, with_row_ids=True):
        assert batch["_row_group"].dtype == batch["_row"].dtype == torch.int64
        assert (starts[batch["_row_group"]] + batch["_row"].numpy()).tolist() == batch["id"].tolist()


def test_a_filter_that_passes_nothing_gives_an_empty_epoch(dataset: Path) -> None:
    with pytest.warns(UserWarning, match="filters= leave none of its 203 rows"):
        loader = ParquetLoader(dataset, 16, filters=[("id", "<", 0)])
    assert (len(loader), list(loader), list(loader)) == (0, [], [])
    loader.set_world(0, 2)
    assert (list(loader), list(loader)) == ([], [])


def test_a_shard_gives_one_ranks_rows_without_repeats(dataset: Path) -> None:
    loaders = [ParquetLoader(dataset, global_batch_size=200, shard=(rank, 5)) for rank in range(5)]
    assert sorted(row for loader in loaders for row in ids(loader)) == list(range(203))
    assert sorted(ids(ParquetLoader(dataset, 16, shard=(1, 3)))) == sorted(
        ids(ParquetLoader(dataset, 16, shard=(1, 3)))
    )


def test_loaders_are_elastic_loaders(dataset: Path) -> None:
    assert isinstance(ParquetLoader(dataset, 16), ElasticLoader)


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


@pytest.mark.parametrize("is_parquet", [True, False])
def test_shares_change_between_two_steps_and_every_row_counts_once(dataset: Path, is_parquet: bool) -> None:
    def make() -> PositionedLoader[Any]:
        if is_parquet:
            return ParquetLoader(dataset, global_batch_size=24, balance="auto")
        return ElasticDataLoader(range(203), global_batch_size=24, balance="auto")

    world = World(make, 3)
    world.same_steps = True
    assert world.step() == [8, 8, 8]
    world.commit()
    changes = [loader.balance([1000, 1000, 3000]) for loader in world.loaders]
    assert changes == [Timing((8, 8, 8), (10, 10, 4), (1000, 1000, 3000), "rows", period=0, rows=24)] * 3
    assert world.step() == [10, 10, 4]
    assert [loader.balance([1000, 0, 3000]) for loader in world.loaders] == [None] * 3, "one was not timed"
    assert world.step() == [10, 10, 4]
    while world.step() is not None:
        pass
    world.commit()
    world.form(2, keep=1)
    assert world.loaders[0].tracker.shares == (), "a new world begins with even shares"
    world.close()
    assert world.counted == collections.Counter((0, row) for row in range(203))


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


def test_what_cannot_be_balanced_is_refused(dataset: Path) -> None:
    with pytest.raises(ValueError, match='balance must be "auto" or None, not True'):
        ParquetLoader(dataset, global_batch_size=8, balance=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='balance="auto" needs global_batch_size='):
        ParquetLoader(dataset, 8, balance="auto")


def test_fewer_rows_than_ranks_leave_some_with_a_repeated_batch_of_weight_zero(tmp_path: Path) -> None:
    world = World(lambda: ParquetLoader(write_dataset(tmp_path, [2, 1]), 4), 8)
    assert sorted(world.step() or []) == [0] * 5 + [1] * 3
    assert world.step() is None
    world.commit()
    assert sorted(world.counted) == [(0, 0), (0, 1), (0, 2)]


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


def test_a_position_goes_on_in_another_loader_and_world_size(dataset: Path) -> None:
    first = ParquetLoader(dataset, global_batch_size=32)
    iterator = iter(first)
    seen = [int(row) for _ in range(3) for row in next(iterator)["id"]]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    first.close()
    rest = []
    for rank in range(3):
        loader = ParquetLoader(dataset, global_batch_size=32)
        loader.load_state_dict(state)
        loader.set_world(rank, 3)
        rest += ids(loader)
    assert sorted(seen + rest) == list(range(203))


def test_outside_a_state_the_first_iteration_after_loading_goes_on_and_the_next_starts_over(dataset: Path) -> None:
    first = ParquetLoader(dataset, 50)
    iterator = iter(first)
    seen = next(iterator)["id"].tolist()
    second = ParquetLoader(dataset, 50)
    second.load_state_dict(first.state_dict())
    assert sorted(seen + ids(second)) == list(range(203))
    assert len(ids(second)) == 203
    first.close()


@pytest.mark.parametrize(
    ("begun_with", "options"),
    [(16, {"batch_size": 4}), (3, {"batch_size": 40}), (16, {"batch_size": 9, "shuffle_rows": 64})],
)
def test_an_epoch_goes_on_in_its_own_order_with_another_batch_size_and_the_next_begins_in_the_new_one(
    tmp_path: Path, begun_with: int, options: dict[str, Any]
) -> None:
    dataset = write_dataset(tmp_path / "data", [40] * 40)
    first = ParquetLoader(dataset, begun_with)
    iterator = iter(first)
    seen = [int(row) for _ in range(5) for row in next(iterator)["id"]]
    resumed = ParquetLoader(dataset, **options)
    assert resumed.state_dict()["order"] != first.state_dict()["order"]
    resumed.load_state_dict(first.state_dict())
    resumed.set_world(0, 1)
    begun = next(iter(resumed))["id"].tolist()
    # A newcomer gets the position from one that has resumed.
    newcomer = ParquetLoader(dataset, **options)
    newcomer.load_state_dict(resumed.state_dict())
    newcomer.set_world(0, 1)
    assert sorted(seen + begun + ids(newcomer)) == list(range(1600))
    fresh = ParquetLoader(dataset, **options)
    for loader in (newcomer, fresh):
        loader.set_epoch(1)
    assert ids(newcomer) == ids(fresh)
    first.close()
    resumed.close()


def test_a_state_of_another_dataset_or_order_is_refused(dataset: Path, tmp_path: Path) -> None:
    state = ParquetLoader(dataset, 16).state_dict()
    other = ParquetLoader(write_dataset(tmp_path / "other", [9]), 16)
    with pytest.raises(DataError, match="the dataset has changed since the state was saved"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="saved with seed=0, this loader has seed=1"):
        ParquetLoader(dataset, 16, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="version"):
        other.load_state_dict({})


# -- rules of iteration ------------------------------------------------------------------------------------------------


def test_in_a_state_iteration_goes_on_after_a_break(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 1)
    seen = []
    for batch in loader:
        seen += batch["id"].tolist()
        if len(seen) == 64:
            break
    assert sorted(seen + ids(loader)) == list(range(203))


def test_an_exhausted_epoch_yields_nothing_once_and_raises_twice_within_one_entry(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 1)
    assert len(ids(loader)) == 203
    with pytest.warns(UserWarning, match=r"there are no batches now. A loader in a State needs set_epoch\(1\) first"):
        assert ids(loader) == []
    with pytest.raises(DataError, match=r"was set_epoch\(1\) forgotten"):
        ids(loader)
    loader.set_world(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ids(loader) == [], "as where the function is entered again at the end of an epoch"
    with pytest.raises(DataError, match="set_epoch"):
        ids(loader)


def test_set_epoch_for_the_current_epoch_does_nothing_and_another_starts_it_at_row_0(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 1)
    next(iter(loader))
    loader.set_epoch(0)
    assert loader.rows_processed == 16
    assert len(ids(loader)) == 203 - 16
    loader.set_epoch(2)
    assert (loader.epoch, loader.rows_processed, loader.steps_left) == (2, 0, 13)
    assert len(ids(loader)) == 203
    with pytest.raises(ValueError, match="epoch must be a whole number from 0 on, not -1"):
        loader.set_epoch(-1)


def test_whole_numbers_of_numpy_are_taken_for_those_of_python(dataset: Path) -> None:
    plain = ParquetLoader(dataset, global_batch_size=16, seed=3)
    loader = ParquetLoader(dataset, global_batch_size=np.int64(16), seed=np.int32(3))
    for one in (plain, loader):
        one.set_epoch(2)
    assert ids(loader) == ids(plain)
    loader.set_epoch(np.int64(5))
    assert type(loader.epoch) is int
    loader.load_state_dict(plain.state_dict())


def test_a_new_world_ends_the_iteration_under_way(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 1)
    iterator = iter(loader)
    next(iterator)
    loader.set_world(1, 2)
    with pytest.raises(DataError, match="the elastic function was entered, which ended this iteration before"):
        next(iterator)
    assert len(ids(loader)) > 0


@pytest.mark.parametrize(
    ("interrupt", "why"),
    [
        (lambda loader: list(loader), "another iteration over this loader was begun"),
        (lambda loader: loader.load_state_dict(loader.state_dict()), "the loader went to a saved position"),
    ],
)
def test_a_loader_whose_iteration_something_else_ends_says_so_instead_of_ending_the_epoch_early(
    dataset: Path, interrupt: Any, why: str
) -> None:
    loader = ParquetLoader(dataset, 16)
    iterator = iter(loader)
    next(iterator)
    interrupt(loader)
    with pytest.raises(DataError, match=f"{why}, which ended this iteration before the epoch's end"):
        next(iterator)
    with pytest.raises(DataError, match="another iteration over this loader was begun"):
        list(zip(loader, loader, strict=True))


def test_an_iteration_that_is_complete_or_ended_on_purpose_has_no_more_batches_and_raises_nothing(
    dataset: Path,
) -> None:
    loader = ParquetLoader(dataset, 16)
    complete = iter(loader)
    list(complete)
    skipped, closed = iter(loader), None
    next(skipped)
    loader.set_epoch(1)
    closed = iter(loader)
    next(closed)
    loader.close()
    list(loader)
    assert [next(each, None) for each in (complete, skipped, closed)] == [None] * 3


def test_taking_fewer_batches_than_the_other_ranks_is_noticed_at_the_commit(dataset: Path) -> None:
    loaders = [ParquetLoader(dataset, 16) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        loader.set_world(rank, 2)
    iterators = [iter(loader) for loader in loaders]
    next(iterators[0])
    reports = [loader.report() for loader in loaders]
    with pytest.raises(DataError, match="rank 1 is at epoch 0, row 0, rank 0 at epoch 0, row 32"):
        loaders[0].confirm(reports)
    for loader in loaders:
        loader.close()


# -- columns -----------------------------------------------------------------------------------------------------------


def of(*columns: tuple[str, Any]) -> pa.Table:
    return pa.table(dict(columns))


def one(tmp_path: Path, table: pa.Table, **options: Any) -> dict[str, torch.Tensor]:
    """Return the whole table as one batch in its order."""
    pq.write_table(table, tmp_path / "one.parquet")
    (batch,) = ParquetLoader(tmp_path / "one.parquet", 1000, shuffle=False, **options)
    return batch


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int8(), torch.int8),
        (pa.uint8(), torch.uint8),
        (pa.int16(), torch.int16),
        (pa.int32(), torch.int32),
        (pa.int64(), torch.int64),
        (pa.float16(), torch.float16),
        (pa.float32(), torch.float32),
        (pa.float64(), torch.float64),
        (pa.uint16(), torch.uint16),
        (pa.uint32(), torch.uint32),
    ],
)
def test_numbers_keep_their_type(tmp_path: Path, kind: pa.DataType, expected: torch.dtype) -> None:
    values = pa.array(np.array([1, 2, 3]).astype(kind.to_pandas_dtype()), kind)
    if kind == pa.float16() and int(pa.__version__.split(".")[0]) < 15:
        pytest.skip("pyarrow below 15, which Petastorm needs, writes no float16 to Parquet")
    batch = one(tmp_path, of(("v", values)))
    assert batch["v"].dtype == expected
    assert batch["v"].tolist() == [1, 2, 3]


def test_bools_and_dictionaries_of_numbers_are_columns(tmp_path: Path) -> None:
    table = of(("b", pa.array([True, False, True])), ("d", pa.array([7, 9, 7]).dictionary_encode()))
    batch = one(tmp_path, table)
    assert batch["b"].dtype == torch.bool
    assert batch["b"].tolist() == [True, False, True]
    assert batch["d"].tolist() == [7, 9, 7]


def test_fixed_size_lists_are_matrices(tmp_path: Path) -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array(range(6), pa.float32()), 3)
    assert one(tmp_path, of(("v", values)))["v"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_lists_of_different_lengths_are_jagged_tensors_in_any_batch(tmp_path: Path) -> None:
    lists = [[float(i)] * (i % 5) for i in range(300)]
    table = of(("id", pa.array(range(300))), ("v", pa.array(lists, pa.list_(pa.float32()))))
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=37)
    seen = 0
    for batch in ParquetLoader(tmp_path / "lists.parquet", 1, shuffle_rows=128):
        assert batch["v"].layout == torch.jagged
    for batch in ParquetLoader(tmp_path / "lists.parquet", 16, shuffle_rows=128):
        assert batch["v"].layout == torch.jagged
        for row, values in zip(batch["id"].tolist(), batch["v"].unbind(), strict=True):
            assert values.tolist() == lists[row]
            seen += 1
    assert seen == 300


def test_lists_whose_lengths_only_look_equal_in_the_footers_are_read_too(tmp_path: Path) -> None:
    lists = [[float(i)] * (i % 3 + 1) for i in range(300)]
    table = of(("id", pa.array(range(300))), ("v", pa.array(lists)))
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=30)
    assert dict(read_manifest(tmp_path / "lists.parquet").list_lengths) == {"v": 2}
    for batch in ParquetLoader(tmp_path / "lists.parquet", 16):
        for row, values in zip(batch["id"].tolist(), batch["v"].unbind(), strict=True):
            assert values.tolist() == lists[row]


def test_row_groups_whose_lists_have_different_lengths_can_be_mixed(tmp_path: Path) -> None:
    lists = [[float(i)] * (1 + i // 30) for i in range(300)]
    table = of(("id", pa.array(range(300))), ("v", pa.array(lists)))
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=30)
    seen = []
    for batch in ParquetLoader(tmp_path / "lists.parquet", 16):
        for row, values in zip(batch["id"].tolist(), batch["v"].unbind(), strict=True):
            assert values.tolist() == lists[row]
            seen.append(row)
    assert sorted(seen) == list(range(300))


SPARK_VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def test_spark_vectors_are_lists_with_all_their_zeros(tmp_path: Path) -> None:
    def vectors(rows: list[list[float]]) -> pa.Array:
        dense = [{"type": 1, "size": None, "indices": None, "values": row} for row in rows]
        places = [[place for place, value in enumerate(row) if value] for row in rows]
        sparse = [
            {"type": 0, "size": len(row), "indices": found, "values": [row[place] for place in found]}
            for row, found in zip(rows, places, strict=True)
        ]
        either = [dense[row] if row % 3 == 0 else sparse[row] for row in range(len(rows))]
        return pa.array(either, SPARK_VECTOR)

    even = [[float(i), 0.0, i % 2 * 0.5, 0.0] for i in range(300)]
    odd = [[0.0, float(i)] * (i % 4) for i in range(300)]
    table = of(("id", pa.array(range(300))), ("even", vectors(even)), ("odd", vectors(odd)))
    pq.write_table(table, tmp_path / "vectors.parquet", row_group_size=37)
    for batch in ParquetLoader(tmp_path / "vectors.parquet", 16):
        rows = batch["id"].tolist()
        assert batch["even"].tolist() == [even[row] for row in rows]
        assert [values.tolist() for values in batch["odd"].unbind()] == [odd[row] for row in rows]


def test_strings_are_left_out_and_refused_when_named(tmp_path: Path) -> None:
    table = of(("id", pa.array([1, 2])), ("s", pa.array(["a", "bc"])))
    assert set(one(tmp_path, table)) == {"id"}
    with pytest.raises(ValueError, match="'s' is string, which cannot be made into a tensor"):
        one(tmp_path, table, columns=["id", "s"])
    with pytest.raises(ValueError, match="'nope' is not in the dataset, which has id, s"):
        one(tmp_path, table, columns=["nope"])


def test_columns_chooses_what_is_read(tmp_path: Path) -> None:
    table = of(("a", [1]), ("b", [2]), ("c", [3]))
    assert set(one(tmp_path, table, columns=["c", "a", "c"])) == {"a", "c"}
    assert set(one(tmp_path, table, columns=[], with_row_ids=True)) == {"_row_group", "_row"}
    with pytest.raises(ValueError, match=r"columns=\[\] names no column"):
        one(tmp_path, table, columns=[])
    with pytest.raises(ValueError, match=r"no column of .*one.parquet has numbers \(\['s'\]\)"):
        one(tmp_path, of(("s", ["x"])))


def test_a_transform_makes_numbers_of_strings_and_nulls(tmp_path: Path) -> None:
    table = of(("v", pa.array([1.0, None, 3.0])), ("s", pa.array(["a", "bc", "def"])))
    arrow = one(
        tmp_path,
        table,
        transform=lambda t: pa.table({"n": pc.utf8_length(t["s"]), "v": pc.fill_null(t["v"], 0.0), "s": t["s"]}),
    )
    assert {name: column.tolist() for name, column in arrow.items()} == {"n": [1, 2, 3], "v": [1, 0, 3]}
    arrays = one(tmp_path, table, transform=lambda t: {"w": np.ones((len(t), 2, 3)), "t": torch.zeros(len(t))})
    assert arrays["w"].shape == (3, 2, 3)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_transform_may_return_the_same_memory_each_time(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table({"v": np.arange(400.0)}), tmp_path / "rows.parquet", row_group_size=50)
    memory = np.zeros(400)

    def fill(table: pa.Table) -> dict[str, Any]:
        part = memory[: len(table)]
        part[:] = table["v"].to_numpy()
        return {"v": part if kind == "array" else torch.from_numpy(part)}

    loader = ParquetLoader(str(tmp_path), global_batch_size=16, shuffle=False, transform=fill)
    assert [value for batch in loader for value in batch["v"].tolist()] == list(range(400))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda t: t.slice(1), "transform returned 2 rows for 3; it must keep all rows"),
        (lambda t: {"v": np.zeros(2)}, "transform returned 2 rows in 'v' for 3"),
        (lambda t: {"v": 7.0}, "transform made column 'v' of one value for 3 rows"),
        (lambda t: 1 / 0, "transform raised ZeroDivisionError"),
        (lambda t: 5, "transform must return a pyarrow.Table or a dict of arrays, not int"),
        (lambda t: {"v": np.array(["a"] * 3)}, "made column 'v' of dtype <U1"),
        (lambda t: {"v": np.ma.masked_less(np.arange(3), 2)}, "'v' of an array that masks 2 values: fill them"),
        (lambda t: {"v": np.arange(3.0).astype(">f4")}, "'v' of >f4, which cannot be made into an array of numbers"),
        (
            lambda t: {"v": torch.zeros(3, dtype=torch.bfloat16)},
            "'v' of torch.bfloat16, which cannot be made into an array",
        ),
    ],
)
def test_a_transform_that_breaks_the_rules_is_named(tmp_path: Path, transform: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"one\.parquet|row group 0") as failure:
        one(tmp_path, of(("v", [1, 2, 3])), transform=transform)
    assert message in str(failure.value)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_transform_whose_columns_depend_on_the_rows_is_an_error(tmp_path: Path, shuffle: bool) -> None:
    def columns_of_values(table: pa.Table) -> dict[str, np.ndarray]:
        values = table["v"].to_numpy()
        return {f"is_{value}": (values == value).astype(float) for value in np.unique(values)}

    pq.write_table(of(("v", [0, 1] * 50 + [0] * 100)), tmp_path / "one.parquet", row_group_size=50)
    loader = ParquetLoader(tmp_path, 20, shuffle=shuffle, shuffle_rows=40, transform=columns_of_values)
    with pytest.raises(DataError, match=r"have the columns .*; a transform= has to make the same columns of all rows"):
        list(loader)


def test_what_a_transform_raises_that_is_no_exception_ends_the_iteration(tmp_path: Path) -> None:
    def leave(table: pa.Table) -> None:
        raise SystemExit(3)

    with pytest.raises(DataError, match="reading ahead failed: SystemExit: 3"):
        one(tmp_path, of(("v", [1, 2])), transform=leave)


def test_row_ids_take_no_columns_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="with_row_ids=True adds a column '_row', and there is one"):
        one(tmp_path, of(("v", [1, 2]), ("_row", [7, 8])), with_row_ids=True)


def test_tensors_have_their_dimensions_in_their_logical_order(tmp_path: Path) -> None:
    def tensors(shape: list[int], order: list[int]) -> pa.ExtensionArray:
        kind = pa.fixed_shape_tensor(pa.int64(), shape, permutation=order)
        rows = np.arange(2 * math.prod(shape)).reshape(2, -1).tolist()
        return pa.ExtensionArray.from_storage(kind, pa.array(rows, pa.list_(pa.int64(), math.prod(shape))))

    batch = one(tmp_path, of(("x", tensors([2, 3], [1, 0])), ("v", [1, 2])), filters=[("v", ">", 0)])
    assert batch["x"].tolist() == np.arange(12).reshape(2, 2, 3).transpose(0, 2, 1).tolist()
    with pytest.raises(DataError, match=r"column 'x' has tensors whose dimensions are in the order \[1, 2, 0\]"):
        one(tmp_path, of(("x", tensors([2, 3, 4], [1, 2, 0]))))


@pytest.mark.parametrize("values", [pa.array([1, None, 3]), pa.array([[1.0], [None], [2.0]])])
def test_nulls_are_an_error_that_names_column_and_row_group(tmp_path: Path, values: pa.Array) -> None:
    with pytest.raises(DataError, match=r"row group 0: column 'v' has 1 nulls"):
        one(tmp_path, of(("v", values)))


# -- filters and partitions --------------------------------------------------------------------------------------------


def test_filters_are_counted_before_the_first_step(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16, filters=[("id", ">=", 100), ("id", "!=", 150)], with_row_ids=True)
    assert loader.rows_total == 102
    found = []
    starts = np.cumsum([0, *[group.rows for group in loader.manifest]])
    for batch in loader:
        found += batch["id"].tolist()
        assert (starts[batch["_row_group"]] + batch["_row"].numpy()).tolist() == batch["id"].tolist()
    assert sorted(found) == [row for row in range(100, 203) if row != 150]
    assert sorted(
        ids(ParquetLoader(dataset, 16, filters=pc.field("id") % 2 == 0 if False else pc.field("id") < 7))
    ) == list(range(7))


def test_filters_exclude_row_groups_by_their_statistics(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_elastic.data.source import Source

    read = []
    batches = Source.batches
    monkeypatch.setattr(Source, "batches", lambda self, group, *rest: read.append(group) or batches(self, group, *rest))
    loader = ParquetLoader(dataset, 16, filters=[("id", ">", 190)], columns=["x"])
    assert len(read) == 2
    assert sum(len(batch["x"]) for batch in loader) == 12
    assert len(set(read)) == 2


def test_a_filter_that_does_not_fit_is_refused(dataset: Path) -> None:
    with pytest.raises(ValueError, match="does not fit the dataset's columns"):
        ParquetLoader(dataset, 16, filters=[("nope", "=", 1)])
    with pytest.raises(ValueError, match="filters="):
        ParquetLoader(dataset, 16, filters=[("id", "?", 1)])


def test_times_without_a_zone_do_not_filter_those_with_one(tmp_path: Path) -> None:
    times = pa.array([datetime.datetime(2024, 1, 1)], pa.timestamp("us", "UTC"))
    with pytest.raises(ValueError, match="does not fit the dataset's columns: Cannot compare timestamp with timezone"):
        one(tmp_path, of(("v", [1]), ("t", times)), filters=[("t", ">", datetime.datetime(2023, 1, 1))])


def test_filters_differ_by_any_of_their_values_and_not_by_the_order_of_a_set(dataset: Path) -> None:
    def named(values: Any) -> tuple[object, str | None]:
        loader = ParquetLoader(dataset, 16, filters=[("id", "in", values)])
        return loader.identity["filters"], RowFilter(loader.manifest, [("id", "in", values)]).key

    assert named(list(range(100))) == named(list(range(100)))
    (text, key), (other_text, other_key) = named(list(range(100))), named([*range(50), 150, *range(51, 100)])
    assert text != other_text
    assert key != other_key
    one, other = {8, 0}, {0, 8}
    assert list(one) != list(other)
    assert named(one) == named(other)


def test_filtered_rows_count_once_through_a_reset(dataset: Path) -> None:
    world = World(lambda: ParquetLoader(dataset, 8, filters=[[("id", "<", 40)], [("id", ">", 99)]]), 3)
    world.step()
    world.commit()
    world.step()
    world.form(2, keep=1)
    while world.step():
        world.commit()
    assert world.counted == collections.Counter({(0, row): 1 for row in [*range(40), *range(100, 203)]})


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


# -- files that change -------------------------------------------------------------------------------------------------


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


def test_files_that_differ_in_their_columns_are_named(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, [10, 10])
    pq.write_table(pa.table({"id": pa.array([1.5]), "x": [[1.0]]}), root / "z.parquet")
    with pytest.raises(DataError, match=r"z\.parquet has another schema than .*part-0\.parquet: column 'id' is double"):
        ParquetLoader(root, 16)


def test_an_error_of_the_reader_reaches_the_consumer_and_iteration_can_start_again(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_elastic.data.arrow_engine import ArrowEngine

    loader = ParquetLoader(dataset, 16)
    with monkeypatch.context() as broken:
        broken.setattr(ArrowEngine, "read", lambda *_: iter([]))
        with pytest.raises(DataError, match="the file is not the one listed"):
            ids(loader)
    assert sorted(ids(loader)) == list(range(203))


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


def test_a_rank_whose_reader_ends_early_is_an_error_at_the_end_of_the_epoch(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_elastic.data.reader import ReadAhead

    monkeypatch.setattr(ReadAhead, "_take", lambda self: [])
    with pytest.raises(DataError, match=r"epoch 0 ended \d+ steps early"):
        ids(ParquetLoader(dataset, 16))


# -- resources ---------------------------------------------------------------------------------------------------------


def test_no_thread_is_started_before_iteration(dataset: Path) -> None:
    before = threading.active_count()
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 2)
    assert threading.active_count() == before


def test_a_forked_child_can_read_while_its_parent_does(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            loader.set_epoch(1)
            code = 0 if sorted(ids(loader)) == list(range(203)) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    loader.close()


def test_read_ahead_is_bounded(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 4, prefetch=3)
    iterator = iter(loader)
    next(iterator)
    generator = iterator._batches.gi_frame.f_locals["opened"]
    ahead = generator.gi_frame.f_locals[".0"].gi_frame.f_locals["self"]
    for _ in range(20):
        next(iterator)
        assert len(ahead._ready) <= 2, "half of what may be read ahead waits, the other half is being built"
    loader.close()


def test_batches_share_the_pinned_memory_that_torch_gave_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a GPU there is no pinned memory. With one, torch keeps the block of a dropped batch from reuse while a copy
    # to the GPU still reads from it, but only for tensors that are views of what its allocator returned.
    given: list[torch.Tensor] = []
    lists_pinned: list[torch.Tensor] = []
    empty = torch.empty

    def pinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if pin_memory:
            given.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: lists_pinned.append(self) or self)
    lists = [[1.0] * (i % 3) for i in range(60)]
    pq.write_table(of(("id", pa.array(range(60))), ("v", pa.array(lists))), tmp_path / "one.parquet")
    batches = list(ParquetLoader(tmp_path / "one.parquet", 16, pin_memory=True))
    blocks = {tensor.untyped_storage()._cdata for tensor in given}
    assert all(batch["id"].untyped_storage()._cdata in blocks for batch in batches)
    assert len(lists_pinned) == len(batches)
    assert sorted(row for batch in batches for row in batch["id"].tolist()) == list(range(60))


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


def test_lengths_follow_the_present_world_with_a_batch_size_per_worker(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 4)
    assert len(loader) == math.ceil(203 / 64)
    loader.set_world(0, 1)
    assert len(loader) == 13


def test_lists_of_different_lengths_are_delivered_without_a_word_of_torchs() -> None:
    code = (
        "import torch; from spark_elastic.data.convert import jagged_tensor; "
        "print(jagged_tensor(torch.arange(5.0), torch.tensor([0, 2, 5])).is_nested)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_two_columns_of_one_name_are_refused_unless_neither_is_read(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], names=["a", "a", "b"])
    pq.write_table(table, tmp_path / "0.parquet")
    for columns in (None, ["a"], [re.compile("a")]):
        with pytest.raises(DataError, match=f"{tmp_path}: the files have several columns named 'a'; choose others"):
            ParquetLoader(tmp_path, 2, columns=columns)
    assert [sorted(batch["b"].tolist()) for batch in ParquetLoader(tmp_path, 2, columns=["b"])] == [[5, 6]]
