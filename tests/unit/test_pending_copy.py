"""Commits of what is on a GPU: they return before their copy is made, and count if it was made ahead of an abort."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_stage import Stage, on_stage

from spark_elastic import snapshot, world
from spark_elastic.errors import HostsUpdatedInterrupt, WorkerLostError
from spark_elastic.messages import CommitId, FormWorld, Member
from spark_elastic.pending_copy import PendingCopy, pending_copy
from spark_elastic.snapshot import Snapshot, SnapshotPair
from spark_elastic.state import ObjectState
from spark_elastic.torch_state import TorchState


class Event:
    """Stands for a CUDA event; the copy is made when somebody waits for it, or ``make`` is called."""

    def __init__(self) -> None:
        self.is_made = False
        self.is_failing = False

    def make(self) -> None:
        self.is_made = True

    def query(self) -> bool:
        if self.is_failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.is_made

    synchronize = make


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events of all copies, which a GPU makes from here on."""
    made: list[Event] = []

    def pending(sources: Any) -> PendingCopy:
        made.append(Event())
        return PendingCopy(made[-1:])  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot, "pending_copy", pending)
    return made


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as staged:
        yield staged


def begun(stage: Stage) -> ObjectState:
    """A state in its first generation, whose seal (1, 0) is whole."""
    state = ObjectState(epoch=0)
    stage.begin(state)
    state._settle()
    assert stage.control.commit == CommitId(1, 0)
    return state


def commit(state: ObjectState, epoch: int) -> None:
    state.epoch = epoch
    state.commit()


def restored(state: ObjectState) -> int:
    state.epoch = -1
    state.restore()
    return state.epoch


def test_a_commit_returns_before_its_copy_is_made_and_counts_from_the_next_one_on(
    stage: Stage, events: list[Event]
) -> None:
    state = begun(stage)
    commit(state, 1)
    assert not events[-1].is_made
    assert stage.control.commit == CommitId(1, 0)
    commit(state, 2)
    assert [event.is_made for event in events[-2:]] == [True, False]
    assert stage.control.commit == CommitId(1, 1)
    assert state._snapshots.current.content()["objects"] == {"epoch": 1}


def test_a_copy_that_an_abort_met_is_none_and_the_commit_before_holds(stage: Stage, events: list[Event]) -> None:
    state = begun(stage)
    commit(state, 1)
    commit(state, 2)
    stage.abort()
    assert restored(state) == 1
    assert stage.control.commit == CommitId(1, 1)


def test_a_copy_that_was_made_ahead_of_the_abort_counts(stage: Stage, events: list[Event]) -> None:
    state = begun(stage)
    commit(state, 1)
    commit(state, 2)
    events[-1].make()
    stage.abort()
    assert restored(state) == 2
    assert stage.control.commit == CommitId(1, 2)


def test_a_copy_that_was_enqueued_after_the_abort_is_none(stage: Stage, events: list[Event]) -> None:
    state = begun(stage)
    commit(state, 1)
    state._settle()
    stage.world.is_broken = lambda: False  # the abort comes between the look at the world and the copy
    stage.abort()
    commit(state, 2)
    events[-1].make()
    assert restored(state) == 1


def test_a_save_after_a_spoilt_one_raises(stage: Stage, events: list[Event]) -> None:
    state = begun(stage)
    commit(state, 1)
    stage.abort()
    with pytest.raises(WorkerLostError, match="generation 1 was aborted"):
        state.save()
    assert restored(state) == 0


def test_a_planned_interrupt_waits_for_the_copy(stage: Stage, events: list[Event]) -> None:
    state = begun(stage)
    stage.control.is_interrupted = True
    commit(state, 1)
    with pytest.raises(HostsUpdatedInterrupt):
        commit(state, 2)
    assert restored(state) == 2
    assert stage.control.commit == CommitId(1, 2)


def test_a_rank_that_leaves_the_function_holds_its_last_commit(stage: Stage, events: list[Event]) -> None:
    state = begun(stage)
    commit(state, 1)
    state._leave(stage.world)
    assert stage.control.commit == CommitId(1, 1)
    commit(state, 2)
    stage.abort()
    with pytest.raises(WorkerLostError):
        state._leave(stage.world)


def test_a_durable_commit_is_waited_for_and_others_are_not(stage: Stage, events: list[Event]) -> None:
    state = begun(stage)
    written = []
    stage.checkpoints = SimpleNamespace(
        is_due=lambda durable: durable,
        begin=lambda commit, copies: written.append((commit, copies.current.content()["steps"])),
    )
    commit(state, 1)
    assert not written
    state.epoch = 2
    state.commit(durable=True)
    assert events[-1].is_made
    assert written == [(CommitId(1, 2), 2)]


def test_a_commit_in_place_is_whole_at_once_whatever_has_happened(stage: Stage, events: list[Event]) -> None:
    """The step was made behind reductions that had been waited for; there is nothing to go back to."""
    model = torch.nn.Linear(1, 1)
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), commit="in_place")
    stage.begin(state)
    model(torch.ones(1, 1)).sum().backward()
    state.optimizer.step()
    stage.world.start_exchange = lambda values: None
    stage.abort()
    state.commit()
    assert stage.control.commit == CommitId(1, 1)


def test_a_copy_in_place_is_made_before_a_writer_gets_it(events: list[Event], stage: Stage) -> None:
    model = torch.nn.Linear(1, 1)
    state = TorchState(model=model, commit="in_place")
    stage.begin(state)
    lent = state._durable_copies().lend()
    assert events[-1].is_made
    assert lent.pending is None


def test_outside_a_job_a_commit_waits(events: list[Event]) -> None:
    state = ObjectState(epoch=1)
    state.commit()
    assert events[-1].is_made
    assert restored(state) == 1


def test_a_switch_waits_for_the_copy(events: list[Event]) -> None:
    pair = SnapshotPair(Snapshot())
    pair.spare.take({}, None)
    assert not events[-1].is_made
    pair.switch()
    assert events[-1].is_made


def test_a_gpu_in_error_does_not_keep_the_control_thread_from_aborting() -> None:
    event = Event()
    event.is_made = event.is_failing = True
    copy = PendingCopy([event])  # type: ignore[list-item]
    copy.before_abort()
    assert copy.outran_abort is False


def test_an_abort_looks_at_the_copy_ahead_of_the_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round, what the abort sets free could complete the copy in between."""
    event, seen = Event(), []

    class Group:
        def __init__(self, *args: Any) -> None: ...

        def abort(self) -> None:
            seen.append(copy.outran_abort)
            event.make()

    monkeypatch.setattr(world, "Group", Group)
    aborted: list[int] = []
    control: Any = SimpleNamespace(is_aborted=lambda generation: generation in aborted)
    order = FormWorld(3, (Member(7, 0, 0, 1, 0, 1, None),), 0, "gloo")
    formed = world.World(control, order, 7, "127.0.0.1", 1.0)
    copy = PendingCopy([event])  # type: ignore[list-item]
    formed.watch(copy)
    formed._abort_if_mine(2)
    assert seen == []
    aborted.append(3)
    formed._abort_if_mine(3)
    assert seen == [False]
    assert not formed.outlives(copy)


def test_nothing_is_pending_on_cpus() -> None:
    assert pending_copy([torch.ones(2)]) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_on_a_gpu_is_pending_until_its_stream_has_come_to_it(stage: Stage) -> None:
    state = ObjectState(weights=torch.zeros(1000, device="cuda"))
    stage.begin(state)
    torch.cuda._sleep(100_000_000)  # cycles
    state.weights += 1
    state.commit()
    pending = state._snapshots.spare.pending
    assert pending is not None
    assert not pending._events[0].query()
    state.weights += 1
    state.restore()
    assert state.weights.eq(1).all()
    assert stage.control.commit == CommitId(1, 1)
