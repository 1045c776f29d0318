"""The reductions of a backward pass are waited for in Python, before the pass ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.ddp.backward import wait_in_backward
from spark_elastic.worker.ddp.comm_hook import CommHook
from spark_elastic.worker.watched_group import Watch


class World:
    """One in which each pass enters a reduction, which ends as ``wait`` says."""

    def __init__(self, wait: Callable[[], object], is_broken: bool = False, runs_ahead: bool = False) -> None:
        watch = Watch(in_order=False)
        self.waits = 0
        self._wait, self._is_broken, self._watch = wait, is_broken, watch
        self.group = SimpleNamespace(runs_ahead=runs_ahead, begin_pass=watch.begin_pass, end_pass=watch.end_pass)

    def reduce(self, gradient: torch.Tensor) -> None:
        wait_in_backward(self)  # type: ignore[arg-type]
        work: Any = SimpleNamespace(wait=self.wait)
        self._watch.reduces(work)

    def wait(self) -> None:
        self.waits += 1
        self._wait()

    def is_broken(self) -> bool:
        return self._is_broken

    def lost(self, error: BaseException) -> WorkerLostError:
        return WorkerLostError(f"generation 1 is broken: {error}")


def fail() -> None:
    raise RuntimeError("Connection closed by peer")


def train(world: Any) -> None:
    """A pass through two outputs, each of which is reduced."""
    outputs = [torch.ones(1, requires_grad=True) * 2 for _ in range(2)]
    for output in outputs:
        output.register_hook(world.reduce)
    sum(outputs).backward()  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def no_hook_has_sent_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommHook, "_last", None)


def test_every_pass_ends_when_its_reductions_have_and_waits_for_each_once() -> None:
    world = World(lambda: None)
    for passes in (1, 2):
        train(world)
        assert world.waits == 2 * passes


def test_a_reduction_that_fails_in_a_broken_world_is_a_lost_worker() -> None:
    with pytest.raises(WorkerLostError, match="Connection closed by peer"):
        train(World(fail, is_broken=True))


def test_a_reduction_that_fails_in_a_whole_world_is_the_users_error() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer") as raised:
        train(World(fail))
    assert not isinstance(raised.value, WorkerLostError)


def test_what_a_hook_has_sent_last_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommHook, "_last", SimpleNamespace(wait=fail))
    with pytest.raises(WorkerLostError):
        train(World(lambda: None, is_broken=True))


def test_a_host_that_runs_ahead_of_its_device_waits_for_nothing() -> None:
    world = World(fail, is_broken=True, runs_ahead=True)
    train(world)
    assert world.waits == 0
