"""A fixed world around a function: what is the user's error and what a loss, and which sizes are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import spark_elastic
from spark_elastic.errors import WorkerLostError
from spark_elastic.protocol.messages import Member
from spark_elastic.worker.fixed_world import call_in_fixed_world


class EndedByDriver(BaseException):
    """In place of the SIGKILL that comes while a worker waits for another world."""


class OneJob:
    def __init__(self) -> None:
        self.broken = self.finished = False
        self.reasons: list[str] = []
        self.voted = 0
        self.state: Any = None
        self.control = SimpleNamespace(ready=self.ready, vote=self.vote)
        self.world: Any = None

    def ready(self, reason: str) -> None:
        self.reasons.append(reason)
        raise EndedByDriver

    def vote(self) -> None:
        self.voted += 1

    def next_world(self, reason: str) -> Any:
        me = Member(7, 1, 0, 1, 1, 2, None)
        self.world = SimpleNamespace(rank=1, size=2, generation=1, backend="gloo", me=me, is_broken=lambda: self.broken)
        return self.world

    def finish(self) -> None:
        self.finished = True


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "init_process_group", module.init_process_group)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def call(function: Callable[[], Any], broken: bool = False) -> OneJob:
    job = OneJob()

    def break_and_call() -> Any:
        job.broken = broken
        return function()

    job.value = call_in_fixed_world(job, break_and_call)  # type: ignore[arg-type,attr-defined]
    return job


def fail(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_the_function_finds_its_rank_and_its_value_is_returned_after_the_vote() -> None:
    job = call(lambda: {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")})
    assert job.value == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1"}  # type: ignore[attr-defined]
    assert (job.voted, job.finished) == (1, True)


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine"), SystemExit(3)])
def test_an_error_of_the_users_is_the_users(error: BaseException) -> None:
    with pytest.raises(type(error)):
        call(fail(error))


@pytest.mark.parametrize("error", [WorkerLostError("gone"), RuntimeError("reset by peer"), KeyError("from garbage")])
def test_whatever_is_raised_in_a_broken_world_is_a_loss(error: BaseException) -> None:
    with pytest.raises(EndedByDriver):
        call(fail(error), broken=True)


def test_an_early_init_process_group_finds_the_group_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    call(lambda: dist.init_process_group())
    call(lambda: dist.init_process_group("gloo", rank=1, world_size=2))
    with pytest.raises(ValueError, match=r"world_size=3\) was called, but this world has world_size=2; leave it out"):
        call(lambda: dist.init_process_group("gloo", world_size=3))
    with pytest.raises(ValueError, match=r"formed this world with 'gloo'.*give run\(backend='nccl'\)"):
        call(lambda: dist.init_process_group("nccl"))


@pytest.mark.parametrize(
    "sizes", [{"num_proc": 2, "max_np": 3}, {"num_proc": 2, "min_np": 1}, {"min_np": 1, "max_np": 2}]
)
def test_a_fixed_world_has_one_size(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="elastic=False makes a world of one size"):
        spark_elastic.run(print, elastic=False, **sizes)


def test_elastic_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="elastic must be True or False, not 1"):
        spark_elastic.run(print, elastic=1)  # type: ignore[arg-type]
