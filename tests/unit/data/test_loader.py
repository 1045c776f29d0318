"""What all loaders share: worlds and positions, the rules of iteration, and what is warned of."""

from __future__ import annotations

import collections
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_worlds import World, write_dataset
from loaded_rows import Numbers, ids, items

from spark_elastic.data import ElasticDataLoader, ParquetLoader
from spark_elastic.data.balance import Timing
from spark_elastic.data.loader import (
    Accountable,
    Countable,
    ElasticLoader,
    PositionedLoader,
    RowSource,
    TakesWorld,
    has_part,
)
from spark_elastic.errors import DataError
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.state.objects import ObjectState

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


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


def test_a_shard_gives_one_ranks_rows_without_repeats(dataset: Path) -> None:
    loaders = [ParquetLoader(dataset, global_batch_size=200, shard=(rank, 5)) for rank in range(5)]
    assert sorted(row for loader in loaders for row in ids(loader)) == list(range(203))
    assert sorted(ids(ParquetLoader(dataset, 16, shard=(1, 3)))) == sorted(
        ids(ParquetLoader(dataset, 16, shard=(1, 3)))
    )


def test_loaders_are_elastic_loaders(dataset: Path) -> None:
    assert isinstance(ParquetLoader(dataset, 16), ElasticLoader)


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
    assert changes == [Timing((8, 8, 8), (10, 10, 4), (1000, 1000, 3000), "rows", period=0, rows=24, fixed=0)] * 3
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


def test_a_rank_whose_reader_ends_early_is_an_error_at_the_end_of_the_epoch(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_elastic.data.reader import ReadAhead

    monkeypatch.setattr(ReadAhead, "_take", lambda self: [])
    with pytest.raises(DataError, match=r"epoch 0 ended \d+ steps early"):
        ids(ParquetLoader(dataset, 16))


def test_lengths_follow_the_present_world_with_a_batch_size_per_worker(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 4)
    assert len(loader) == math.ceil(203 / 64)
    loader.set_world(0, 1)
    assert len(loader) == 13


class Wrapped:
    """Hands on what it does not have to the loader inside it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


@pytest.mark.parametrize("part", [TakesWorld, RowSource, Accountable, Countable])
def test_a_wrapper_that_hands_on_a_loaders_attributes_is_one(part: type[Any]) -> None:
    assert has_part(Wrapped(ElasticDataLoader(Numbers(4), 2)), part)
    assert not has_part(Wrapped([]), part)


def test_going_back_to_an_epoch_before_that_of_the_state_is_warned_of_once_on_rank_0() -> None:
    loader: Any = ElasticDataLoader(range(8), global_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_world(0, 2)
        for epoch in (0, 1, 2, 0, 2):  # a first entry has nothing to go back from, and users may go round
            loader.set_epoch(epoch)
        for rank in (0, 1):
            loader.set_world(rank, 2)
            loader.set_epoch(2)
            loader.set_epoch(3)
            loader.set_epoch(2)
        loader.set_world(1, 2)
        loader.set_epoch(0)
        loader.set_epoch(2)
    loader.set_world(0, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for epoch in range(3):
            loader.set_epoch(epoch)
    assert [warning.filename for warning in told] == [__file__]
    assert "set_epoch(0) goes back from epoch 2" in str(told[0].message)


def test_a_length_that_was_asked_for_before_there_was_a_world_is_corrected_once_where_the_world_has_another() -> None:
    alone, whole, inside = (
        ElasticDataLoader(Numbers(10), **size)
        for size in ({"batch_size": 2}, {"global_batch_size": 2}, {"batch_size": 2})
    )
    assert bool(inside), "whether there is a loader is no question about its length"
    assert len(alone) == len(whole) == 5
    with pytest.warns(UserWarning, match=r"len\(loader\) was 5 above the elastic function.* is 2 with 2 workers"):
        alone.set_world(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone.set_world(0, 3)
        whole.set_world(0, 2)
        inside.set_world(0, 2)
        assert len(inside) == 2
        inside.set_world(0, 3)


def test_a_batch_that_the_whole_dataset_cannot_fill_is_refused_where_it_would_be_dropped() -> None:
    loader = ElasticDataLoader(Numbers(10), global_batch_size=64, drop_last=True)
    with pytest.raises(
        ValueError, match="10 rows do not make a single batch of global_batch_size=64: nothing would train"
    ):
        iter(loader)
    assert len(items(ElasticDataLoader(Numbers(10), global_batch_size=64))) == 10


def test_a_world_that_is_too_large_for_a_single_batch_is_warned_of_once_a_world() -> None:
    first, second = (ElasticDataLoader(Numbers(10), batch_size=4, drop_last=True) for _ in range(2))
    for rank, loader in enumerate((first, second)):
        loader.set_world(rank, 3)
    with pytest.warns(UserWarning, match="batch_size=4 a worker with 3 workers: epoch 0 trains nothing"):
        assert items(first) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert items(second) == []
        first.set_world(0, 2)
        assert len(items(first)) == 4


@pytest.mark.parametrize("is_parquet", [True, False])
@pytest.mark.parametrize("batches", [0, 1, 13])
def test_what_was_looked_at_above_the_elastic_function_is_still_to_be_trained(
    dataset: Path, is_parquet: bool, batches: int
) -> None:
    loader: Any = ParquetLoader(dataset, 16) if is_parquet else ElasticDataLoader(Numbers(203), 16)
    loader.set_epoch(2)
    looking = iter(loader)
    assert len([next(looking) for _ in range(batches)]) == batches
    state = ObjectState(loader=loader, rows=0)

    @elastic
    def train(state: Any) -> None:
        for batch in state.loader:
            state.rows += len(batch["id"] if is_parquet else batch)
            state.commit()

    train(state)
    assert (state.rows, loader.epoch) == (203, 2)
    loader.close()


def test_a_position_that_was_loaded_stays_where_the_elastic_function_is_entered(dataset: Path) -> None:
    before = ParquetLoader(dataset, 16)
    looking = iter(before)
    for _ in range(3):
        next(looking)
    loader = ParquetLoader(dataset, 16)
    loader.load_state_dict(before.state_dict())
    loader.start_over()
    assert loader.rows_processed == before.rows_processed == 48
    before.close()


def test_an_epoch_without_a_batch_is_not_said_to_have_been_iterated(dataset: Path) -> None:
    loader = ParquetLoader(dataset, batch_size=150, drop_last=True)
    loader.set_world(0, 2)
    with pytest.warns(UserWarning, match="do not make a single batch") as told:
        assert list(loader) == []
    assert len(told) == 1
