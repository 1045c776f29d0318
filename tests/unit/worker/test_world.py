"""World: what is looked at before an end, what a rank waits for, and what its exchanges bring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from played_copies import Copy

from spark_elastic.errors import WorkerLostError
from spark_elastic.protocol.messages import CommitId, FormWorld, Member
from spark_elastic.worker.runtime import Runtime
from spark_elastic.worker.world import World, translated_errors


class Group:
    """Stands for the process group; what its aborts set free completes the copy."""

    def __init__(self, copy: Copy) -> None:
        self.seen: list[tuple[str, bool | None]] = []
        self.broken = self.runs_ahead = True
        self._copy = copy

    def is_broken(self) -> bool:
        return self.broken

    def abort(self) -> None:
        self.seen.append(("host", self._copy.was_made))
        self._copy.make()

    def abort_device(self) -> None:
        self.seen.append(("device", self._copy.was_made))


def formed(copy: Copy) -> tuple[World, Group]:
    """Generation 3, which is aborted as soon as its group is."""
    group = Group(copy)
    control: Any = SimpleNamespace(is_aborted=lambda generation: bool(group.seen))
    order = FormWorld(3, (Member(7, 0, 0, 1, 0, 1, None),), 0, "nccl")
    runtime = Runtime(group=lambda *args: group)  # type: ignore[arg-type,return-value]
    return World(control, order, 7, "127.0.0.1", 1.0, runtime), group


def test_an_end_is_looked_at_ahead_of_the_aborts_of_the_host_and_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copy()
    made, group = formed(copy)
    made.watch(copy)
    for generation in (2, 3):
        made.abort(generation)
        made.abort_device(generation)
    assert group.seen == [("host", False), ("device", False)]
    assert not made.wait_for(copy)


def test_a_rank_is_stuck_while_it_waits_for_a_copy_and_a_peer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may take that peer for one that has left its collectives, and order no abort by itself."""
    found = []

    class Waited(Copy):
        def wait(self) -> None:
            found.append(made.is_stuck())
            group.broken = False
            found.append(made.is_stuck())

    copy = Waited()
    made, group = formed(copy)
    assert not made.is_stuck()
    assert made.wait_for(copy)
    group.broken = True
    assert not made.is_stuck()
    assert found == [True, False]


def test_where_the_host_waits_for_its_reductions_a_copy_is_whole_whenever_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo's reductions before it had succeeded when the host went on."""
    copy = Copy()
    made, group = formed(copy)
    group.runs_ahead = False
    made.watch(copy)
    made.abort(3)
    assert made.wait_for(copy)


def test_a_rank_is_not_ready_before_its_gpu_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _group = formed(Copy())
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append(made.is_stuck()))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    made.rest()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    made.rest()
    assert seen == [True]


@pytest.mark.parametrize("error", [None, RuntimeError("connection closed")])
def test_a_rank_has_met_the_others_once_the_reduction_has_ended(error: RuntimeError | None) -> None:
    waited = []

    def wait() -> None:
        waited.append(True)
        if error is not None:
            raise error

    work = SimpleNamespace(wait=wait)
    group = SimpleNamespace(runs_ahead=False, take_reduction=lambda: work)
    world: Any = SimpleNamespace(group=group, lost=lambda error: WorkerLostError(str(error)))
    if error is None:
        assert World.has_met(world)
    else:
        with pytest.raises(WorkerLostError, match="closed"):
            World.has_met(world)
    assert waited
    group.runs_ahead = True
    assert not World.has_met(world)
    group.runs_ahead, work = False, None
    assert not World.has_met(world)


class Alone:
    """Stands for the process group of a world of one."""

    runs_ahead = False


def alone(control: Any) -> World:
    order = FormWorld(3, (Member(7, 0, 0, 1, 0, 1, CommitId(2, 5)),), 2, "gloo")
    runtime = Runtime(group=lambda *args: Alone())  # type: ignore[arg-type,return-value]
    return World(control, order, 7, "127.0.0.1", 1.0, runtime)


def test_a_rank_that_is_alone_exchanges_with_itself_once_for_each_commit() -> None:
    made = alone(None)
    assert (made.rank, made.size, made.newest_commit) == (0, 1, CommitId(2, 5))
    assert made.finish_exchange() is None
    made.start_exchange([4, -7, 2**40])
    assert made.finish_exchange() == [[4, -7, 2**40]]
    assert made.finish_exchange() is None
    assert made.gather(9) == [9]


@pytest.mark.parametrize("is_broken", [True, False])
def test_an_error_of_a_collective_is_a_lost_worker_where_the_world_is_broken_and_else_the_users(
    is_broken: bool,
) -> None:
    control: Any = SimpleNamespace(is_aborted=lambda generation: is_broken, abort_reason="rank 1 on b was lost")
    made = alone(control)
    made.group.is_broken = lambda: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError if not is_broken else WorkerLostError) as raised, translated_errors(made):
        raise RuntimeError("Connection reset by peer")
    told = "generation 3 is broken: rank 1 on b was lost" if is_broken else "Connection reset by peer"
    assert str(raised.value) == told
    with pytest.raises(ValueError, match="x"), translated_errors(made):
        raise ValueError("x")


def test_outside_a_world_errors_are_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="x"), translated_errors(None):
        raise RuntimeError("x")
