"""Commits: numbered on each rank, named by generation and index, and interrupted on all ranks at the same one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from worker_stage import on_stage

from spark_elastic.errors import HostsUpdatedInterrupt, SparkElasticError, TrainingCodeError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.records import Entered, Metrics, Progress, Stepped
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.torch_state import TorchState


def test_commits_are_named_by_generation_and_index() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        assert stage.control.commit == CommitId(1, 0)
        state.commit()
        state.commit()
        assert stage.control.commit == CommitId(1, 2)
        stage.begin(state)
        assert stage.control.commit == CommitId(2, 0)


def test_a_commit_in_a_broken_world_is_not_saved() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        state.epoch, stage.broken = 1, True
        with pytest.raises(WorkerLostError):
            state.commit()
        assert stage.control.commit == CommitId(1, 0)
        state.restore()
        assert state.epoch == 0


def test_an_interrupt_is_raised_one_commit_later_on_all_ranks_and_loses_nothing() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        stage.control.is_interrupted = True
        state.commit()
        state.epoch = 2
        with pytest.raises(HostsUpdatedInterrupt):
            state.commit()
        state.epoch = 3
        state.restore()
        assert state.epoch == 2


def test_an_interrupt_that_only_another_rank_has_seen_is_raised_here_too() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state, others=[None])
        stage.peers = lambda mine: [mine, [1, *mine[1:]]]
        state.commit()
        with pytest.raises(HostsUpdatedInterrupt):
            state.commit()


def test_an_interrupt_that_was_swallowed_is_raised_again_at_the_next_commit() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        stage.control.is_interrupted = True
        state.commit()
        for _ in range(4):
            with pytest.raises(HostsUpdatedInterrupt):
                state.commit()
            stage.control.is_interrupted = False


def test_check_host_updates_commits_only_if_it_interrupts() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        state.check_host_updates()
        assert stage.control.commit == CommitId(1, 0)
        stage.control.is_interrupted = True
        state.check_host_updates()
        with pytest.raises(HostsUpdatedInterrupt):
            state.check_host_updates()
        assert stage.control.commit == CommitId(1, 1)


def test_ranks_that_commit_unequally_often_are_told() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state, others=[None])
        stage.peers = lambda mine: [mine, [mine[0], mine[1] - 1, *mine[2:]]]
        state.commit()
        with pytest.raises(TrainingCodeError, match="equally often"):
            state.commit()


def test_who_enters_a_generation_says_so_and_rank_0_tells_how_far_the_job_is() -> None:
    loader = SimpleNamespace(epoch=1, rows_processed=30, rows_total=100)
    progress = Progress(step=0, epoch=1, rows=30, rows_total=100)
    for rank, told in ((0, [Entered(0), progress, Stepped(1)]), (1, [Entered(0), Stepped(1)])):
        with on_stage() as stage:
            state = TorchState(loader=loader)
            stage.begin(state, rank=rank, others=[None])
            state.commit()
            assert stage.control.reported == told


def lose_a_peer(old: int, new: int) -> None:
    """A reset callback that reduces something, and meets a peer that dies."""
    raise WorkerLostError("a peer died")


def test_a_newcomer_survives_a_loss_between_its_repair_and_the_first_commit() -> None:
    with on_stage() as stage:
        state = TorchState(epoch=0)
        state.register_reset_callbacks([lose_a_peer])
        stage.arriving = {"steps": 4, "size": 1, "objects": {"epoch": 4}}
        with pytest.raises(WorkerLostError):
            stage.begin(state, rank=1, others=[CommitId(3, 4)])
        state.restore()
        assert state.epoch == 4


def test_the_step_does_not_grow_by_a_loss_before_the_first_commit_of_a_generation() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        for _ in range(5):
            state.commit()
        for _ in range(3):
            stage.begin(state)
            state.restore()
        state.commit()
        state.report()
        assert stage.control.reported[-1] == Metrics({"step": 6})


def test_a_repaired_rank_holds_the_newest_commit_before_its_seal() -> None:
    """A donor may die when only some receivers are done: who has the commit has to say so."""
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        state.commit()
        state.register_reset_callbacks([lose_a_peer])
        stage.arriving = {"steps": 3, "size": 1, "objects": {"epoch": 3}}
        with pytest.raises(WorkerLostError):
            stage.begin(state, others=[CommitId(1, 3)])
        assert stage.control.commit == CommitId(1, 3)


def test_a_second_state_cannot_commit_in_a_job() -> None:
    with on_stage() as stage:
        stage.begin(ObjectState(epoch=0))
        with pytest.raises(SparkElasticError, match="only the state that was given to the elastic function can commit"):
            ObjectState(other=1).commit()
