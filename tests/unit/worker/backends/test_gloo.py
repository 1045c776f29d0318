"""Gloo's groups of two ranks in one process: they are built over a store, and an abort reaches every one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from store_control import GENERATION, Control

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.backends import gloo
from spark_elastic.worker.backends.gloo import Gloo
from spark_elastic.worker.torch_store import WorldStore

SECONDS = 30


def both(act: Callable[[int], Any]) -> list[Any]:
    """Have two ranks act at the same time."""
    with ThreadPoolExecutor(2) as threads:
        acting = [threads.submit(act, rank) for rank in range(2)]
        return [each.result(SECONDS) for each in acting]


def add_up(groups: list[Any]) -> list[float]:
    def add(rank: int) -> float:
        tensor = torch.full((1,), rank + 1.0)
        groups[rank].allreduce([tensor]).wait()
        return tensor.item()

    return both(add)


@pytest.fixture
def pair() -> Iterator[list[Gloo]]:
    control: Any = Control()
    made = [
        Gloo(WorldStore(control, GENERATION), rank, 2, "127.0.0.1", timedelta(seconds=SECONDS)) for rank in range(2)
    ]
    both(lambda rank: made[rank].build())
    yield made
    for each in made:
        each.abort()
    for each in made:
        each.close()
        each.drop()


def groups_of(pair: list[Gloo]) -> list[Any]:
    return [each.group for each in pair]


def subgroups_of(pair: list[Gloo]) -> list[Any]:
    store = dist.HashStore()
    return both(lambda rank: pair[rank].subgroup(dist.PrefixStore("mine", store), rank, 2))


def test_groups_of_all_ranks_and_of_user_code_reduce(pair: list[Gloo]) -> None:
    assert add_up(groups_of(pair)) == [3.0, 3.0]
    assert add_up(subgroups_of(pair)) == [3.0, 3.0]


@pytest.mark.parametrize("groups", [groups_of, subgroups_of], ids=["all ranks", "user code"])
def test_an_abort_on_one_rank_ends_what_both_wait_for(pair: list[Gloo], groups: Callable[..., list[Any]]) -> None:
    (one, other) = groups(pair)
    waiting = [one.recv([torch.zeros(1)], 1, 0), other.recv([torch.zeros(1)], 0, 0)]
    pair[0].abort()

    def wait(rank: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            waiting[rank].wait()
        return str(raised.value)

    assert all(both(wait))


def test_a_works_guard_frees_who_waits_for_what_gloo_has_lost(
    pair: list[Gloo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation never ends, as one that Gloo has lost; only the abort frees its waiter."""
    monkeypatch.setattr(gloo, "LOOK_SECONDS", 0.001)
    work: Any = torch._C._distributed_c10d._create_work_from_future(torch.futures.Future())  # type: ignore[attr-defined]
    guarded = pair[0].guard(work)
    pair[0].abort()
    with pytest.raises(RuntimeError):
        guarded.wait()


def test_a_rank_that_does_not_know_the_secret_is_noticed_by_those_who_do(
    pair: list[Gloo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "_secret_of", lambda store, rank: bytes([rank] * 16))
    store = dist.HashStore()

    def join(rank: int) -> str:
        with pytest.raises(WorkerLostError) as raised:
            pair[rank].subgroup(dist.PrefixStore("mine", store), rank, 2)
        return str(raised.value)

    assert ["does not know the secret of a group of generation 7" in told for told in both(join)] == [True, True]


def test_the_secret_of_a_group_is_its_first_ranks_and_another_one_each_time() -> None:
    secrets = []
    for _ in range(2):
        store = dist.HashStore()
        one, other = both(lambda rank, store=store: gloo._secret_of(store, rank))
        assert one == other
        secrets.append(one)
    assert len(set(secrets)) == 2


def test_once_closed_and_dropped_no_thread_of_an_abort_is_left(pair: list[Gloo]) -> None:
    for each in pair:
        each.abort()
        each.close()
        each.drop()
        assert each.group is None
    for thread in [each for each in threading.enumerate() if each.name == "spark_elastic-lost-works"]:
        thread.join(SECONDS)
        assert not thread.is_alive()
