from __future__ import annotations

import collections
import multiprocessing
import pickle
import random
from typing import Any

import pytest
import torch
from data_worlds import BRIEF, World
from hypothesis import given
from hypothesis import strategies as st
from loaded_rows import Numbers, items
from torch.utils.data import DataLoader, IterableDataset

from spark_elastic.data import ElasticDataLoader
from spark_elastic.data.loader import ElasticLoader
from spark_elastic.errors import DataError


def test_an_epoch_holds_every_item_once_in_an_order_of_its_own() -> None:
    loader = ElasticDataLoader(Numbers(100), 8)
    first = items(loader)
    loader.set_epoch(1)
    second = items(loader)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second != sorted(second)
    assert isinstance(loader, ElasticLoader)


def test_a_loader_can_be_pickled_also_while_it_is_iterated() -> None:
    loader = ElasticDataLoader(Numbers(20), 8)
    expected = items(loader)
    assert items(pickle.loads(pickle.dumps(loader))) == expected
    iterator = iter(loader)
    begun = next(iterator).tolist()
    assert items(pickle.loads(pickle.dumps(loader))) == expected
    assert begun + [item for batch in iterator for item in batch.tolist()] == expected, (
        "the copy has not ended this iteration"
    )


@pytest.mark.parametrize("shard", [5, (0,), "01", (0.0, 2), (True, 2), (-1, 2), (0, 0), (2, 2)], ids=str)
def test_a_shard_is_a_rank_below_a_size(shard: Any) -> None:
    with pytest.raises(
        ValueError, match=r"shard must be a pair|of shard must be a whole number|must be from 0 and below size"
    ):
        ElasticDataLoader(Numbers(20), 8, shard=shard)


def test_unshuffled_items_come_in_order() -> None:
    assert items(ElasticDataLoader(Numbers(20), 8, shuffle=False)) == list(range(20))


def test_what_workers_prefetched_does_not_count() -> None:
    loader = ElasticDataLoader(Numbers(100), 4, num_workers=2, prefetch_factor=4)
    loader.set_world(0, 1)
    iterator = iter(loader)
    seen = [int(item) for _ in range(3) for item in next(iterator)]
    state = loader.state_dict()
    assert (state["position"], loader.rows_processed) == (12, 12)
    loader.close()
    assert multiprocessing.active_children() == []
    again = ElasticDataLoader(Numbers(100), 4)
    again.load_state_dict(state)
    again.set_world(0, 1)
    assert sorted(seen + items(again)) == list(range(100))


@BRIEF
@given(
    count=st.integers(0, 200),
    batch=st.integers(1, 40),
    fixed=st.booleans(),
    balanced=st.booleans(),
    size=st.integers(1, 8),
    schedule=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 8), st.integers(0, 8)), max_size=5),
)
def test_every_item_counts_once_through_any_schedule_of_resets(
    count: int, batch: int, fixed: bool, balanced: bool, size: int, schedule: list[tuple[int, bool, int, int]]
) -> None:
    sizes = {"global_batch_size": batch} if fixed else {"batch_size": batch}
    world = World(lambda: ElasticDataLoader(Numbers(count), seed=7, **sizes), size)
    world.same_steps, world.chance = fixed, random.Random(batch) if balanced else None
    for steps, commit, new_size, survivors in [*schedule, (count + 1, True, 1, 0)]:
        for _ in range(steps):
            if world.step() is None:
                break
            if commit:
                world.commit()
        world.form(new_size, survivors)
    world.close()
    assert world.counted == collections.Counter({(0, item): 1 for item in range(count)})


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    items(ElasticDataLoader(Numbers(10), 2))
    assert torch.equal(before, torch.get_rng_state())


def test_arguments_that_torch_does_not_know_or_take_are_refused_before_the_first_batch() -> None:
    with pytest.raises(TypeError, match="'foo'"):
        ElasticDataLoader(Numbers(10), 3, foo=1)
    with pytest.raises(ValueError, match="num_workers"):
        ElasticDataLoader(Numbers(10), 3, num_workers=-1)
    with pytest.raises(ValueError, match="seed must be a whole number from 0 on, not 'x'"):
        ElasticDataLoader(Numbers(10), 3, seed="x")


def test_arguments_that_choose_items_are_refused() -> None:
    with pytest.raises(ValueError, match="sampler= is chosen by ElasticDataLoader"):
        ElasticDataLoader(Numbers(10), 2, sampler=[1])

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="Stream is not a map-style dataset"):
        ElasticDataLoader(Stream(), 2)
    with pytest.raises(TypeError, match=r"makes the DataLoader itself: give loader\.dataset"):
        ElasticDataLoader(DataLoader(range(8)), 2)  # type: ignore[arg-type]


def test_batches_out_of_order_are_refused() -> None:
    ElasticDataLoader(range(9), 3, in_order=True)
    with pytest.raises(ValueError, match="in_order=False would hand out batches in another order"):
        ElasticDataLoader(range(9), 3, in_order=False, num_workers=2)


def test_a_dataset_that_changes_its_length_is_an_error() -> None:
    numbers = Numbers(10)
    loader = ElasticDataLoader(numbers, 2)
    numbers.count = 9
    with pytest.raises(DataError, match="had 10 items when the loader was made, now 9"):
        items(loader)


def test_an_error_of_the_dataset_is_raised_as_it_is() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise KeyError(index)

    with pytest.raises(KeyError):
        items(ElasticDataLoader(Broken(4), 2))
