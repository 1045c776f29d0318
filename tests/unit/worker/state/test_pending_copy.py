"""Commits of what is on a GPU: they return before their copy is made, and count if it was made ahead of an abort."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from played_copies import Copy
from worker_stage import Stage, on_stage

from spark_elastic.errors import HostsUpdatedInterrupt, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.state import snapshot
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.pending_copy import pending_copy
from spark_elastic.worker.state.snapshot import Snapshot, SnapshotPair
from spark_elastic.worker.state.torch_state import TorchState


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """All copies, which a GPU makes from here on."""
    made: list[Copy] = []

    def pending(sources: Any) -> Copy:
        made.append(Copy())
        return made[-1]

    monkeypatch.setattr(snapshot, "pending_copy", pending)
    return made


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as staged:
        yield staged


def begun(stage: Stage) -> ObjectState:
    """A state in its first generation that has made one commit, (1, 1), since those to come are not waited for."""
    state = ObjectState(epoch=0)
    stage.begin(state)
    assert stage.control.commit == CommitId(1, 0)
    commit(state, 1)
    assert stage.control.commit == CommitId(1, 1)
    return state


def commit(state: ObjectState, epoch: int) -> None:
    state.epoch = epoch
    state.commit()


def restored(state: ObjectState) -> int:
    state.epoch = -1
    state.restore()
    return state.epoch


def test_a_commit_returns_before_its_copy_is_made_and_counts_from_the_next_one_on(
    stage: Stage, copies: list[Copy]
) -> None:
    state = begun(stage)
    commit(state, 2)
    assert not copies[-1].is_made()
    assert stage.control.commit == CommitId(1, 1)
    commit(state, 3)
    assert [copy.is_made() for copy in copies[-2:]] == [True, False]
    assert stage.control.commit == CommitId(1, 2)
    assert state._keeper.current.content()["objects"] == {"epoch": 2}


def test_a_copy_that_was_not_made_when_all_ranks_looked_does_not_count(stage: Stage, copies: list[Copy]) -> None:
    state = begun(stage)
    commit(state, 2)
    stage.abort()
    copies[-1].make()
    stage.abort()  # looking again changes nothing
    assert restored(state) == 1
    assert stage.control.commit == CommitId(1, 1)


def test_a_copy_that_was_made_before_counts(stage: Stage, copies: list[Copy]) -> None:
    state = begun(stage)
    commit(state, 2)
    copies[-1].make()
    stage.abort()
    assert restored(state) == 2
    assert stage.control.commit == CommitId(1, 2)


def test_a_copy_that_was_enqueued_after_the_look_does_not_count(stage: Stage, copies: list[Copy]) -> None:
    state = begun(stage)
    stage.world.is_broken = lambda: False  # the driver's word comes between the look at the world and the copy
    stage.abort()
    commit(state, 2)
    copies[-1].make()
    assert restored(state) == 1


def test_a_save_after_a_spoilt_one_raises(stage: Stage, copies: list[Copy]) -> None:
    state = begun(stage)
    commit(state, 2)
    stage.abort()
    with pytest.raises(WorkerLostError, match="generation 1 was aborted"):
        state.save()
    assert restored(state) == 1


def test_a_sync_by_the_user_does_not_write_into_a_copy_under_way(stage: Stage, copies: list[Copy]) -> None:
    state = begun(stage)
    commit(state, 2)
    state.sync()
    assert copies[-1].is_made()
    assert stage.control.commit == CommitId(1, 2)


def test_a_planned_interrupt_waits_for_the_copy(stage: Stage, copies: list[Copy]) -> None:
    state = begun(stage)
    stage.control.is_interrupted = True
    commit(state, 2)
    with pytest.raises(HostsUpdatedInterrupt):
        commit(state, 3)
    assert restored(state) == 3
    assert stage.control.commit == CommitId(1, 3)


def test_a_rank_that_leaves_the_function_holds_its_last_commit(stage: Stage, copies: list[Copy]) -> None:
    state = begun(stage)
    commit(state, 2)
    state._leave(stage.world)
    assert stage.control.commit == CommitId(1, 2)
    commit(state, 3)
    stage.abort()
    with pytest.raises(WorkerLostError):
        state._leave(stage.world)


def test_a_commit_that_is_to_be_written_is_waited_for_and_others_are_not(stage: Stage, copies: list[Copy]) -> None:
    written: list[Any] = []
    stage.checkpoints = checkpoints = SimpleNamespace(
        metric=None,
        asked=False,
        restore=lambda device: None,
        ask=lambda: setattr(checkpoints, "asked", True),
        is_due=lambda: checkpoints.asked,
        begin=lambda commit, copies: written.append((commit, copies.current.content()["steps"])),
    )
    state = begun(stage)
    commit(state, 2)
    assert not copies[-1].is_made()
    assert not written
    state.commit(durable=True)
    assert written == [(CommitId(1, 3), 3)]


def test_the_first_commits_of_a_generation_are_waited_for(stage: Stage, copies: list[Copy]) -> None:
    """The driver takes them for signs that the world has the state, and that it gets on."""
    state = begun(stage)
    stage.begin(state)
    assert stage.control.commit == CommitId(2, 0)
    commit(state, 2)
    assert stage.control.commit == CommitId(2, 1)


def test_a_commit_in_place_is_whole_at_once_whatever_has_happened(stage: Stage, copies: list[Copy]) -> None:
    """The step was made behind reductions that had been waited for; there is nothing to go back to."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), commit="in_place")
    stage.begin(state)
    state.commit()
    model(torch.ones(1, 1)).sum().backward()
    state.optimizer.step()
    stage.world.start_exchange = lambda values: None
    stage.abort()
    state.commit()
    assert stage.control.commit == CommitId(1, 2)


def test_a_copy_in_place_is_made_before_a_writer_gets_it(stage: Stage, copies: list[Copy]) -> None:
    state = TorchState(model=torch.nn.Linear(1, 1), commit="in_place")
    stage.begin(state)
    lent = state._lend().lend()
    assert copies[-1].is_made()
    assert lent.pending is None


def test_outside_a_job_a_commit_waits(copies: list[Copy]) -> None:
    state = ObjectState(epoch=0)
    for epoch in (1, 2, 3):
        commit(state, epoch)
        assert copies[-1].is_made()
    assert restored(state) == 3


def test_a_switch_waits_for_the_copy(copies: list[Copy]) -> None:
    pair = SnapshotPair(Snapshot())
    pair.spare.take({}, None)
    assert not copies[-1].is_made()
    pair.switch()
    assert copies[-1].is_made()


def test_room_that_has_been_made_is_not_written_to_any_more(copies: list[Copy]) -> None:
    """What arrives from another rank is written there by the CPU."""
    SnapshotPair().make_room({"weights": torch.ones(2)})
    assert [copy.is_made() for copy in copies] == [True, True]


def test_nothing_is_pending_where_no_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert pending_copy([torch.ones(2)]) is None
