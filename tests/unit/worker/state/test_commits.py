"""Commits: numbered on each rank, named by generation and index, and interrupted on all ranks at the same one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from worker_stage import Stage, on_stage

from spark_elastic.errors import HostsUpdatedInterrupt, SparkElasticError, TrainingCodeError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.reports import Entered, Metrics, Progress, Stepped
from spark_elastic.worker.reporting import Reporter
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


def test_a_failed_reduction_does_not_take_a_step_back_that_has_no_copy() -> None:
    with on_stage() as stage:
        state = TorchState(torch.nn.Linear(1, 1), commit="in_place")
        stage.begin(state)

        def fails() -> bool:
            raise WorkerLostError("a rank is lost")

        stage.world.has_met = fails
        with pytest.raises(WorkerLostError):
            state.commit()
        state._keeper.guard.dirty = True  # type: ignore[attr-defined]  # the optimizer has stepped
        state.commit()
        assert stage.control.commit == CommitId(1, 1)


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


def test_who_enters_a_generation_says_so_and_rank_0_tells_how_far_the_job_is() -> None:
    loader = SimpleNamespace(epoch=1, rows_processed=30, rows_total=100)
    progress = Progress(step=0, epoch=1, rows=30, rows_total=100)
    for rank, told in ((0, [Entered(0), progress, Stepped(1)]), (1, [Entered(0), Stepped(1)])):
        with on_stage() as stage:
            state = TorchState(loader=loader)
            stage.reporter = Reporter(stage.control.report, lambda: 0.0)  # no time passes in which it would tell more
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


def interrupt(stage: Stage, state: ObjectState) -> None:
    """Make two commits, of which the second one raises that the world changes."""
    stage.control.is_interrupted = True
    state.commit()
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()


def test_what_code_did_after_it_had_swallowed_an_interrupt_belongs_to_no_commit() -> None:
    """An epoch's loop in a try block: the next commit kept the skipped rest of the epoch as if it had been trained."""
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        interrupt(stage, state)
        state.epoch = 1
        for again in (state.commit, state.check_host_updates):
            with pytest.raises(HostsUpdatedInterrupt):
                again()
        state.restore()
        assert (state.epoch, stage.control.commit) == (0, CommitId(1, 2))


def test_a_function_that_returns_after_it_has_swallowed_an_interrupt_is_entered_again() -> None:
    """A loop that went on with the next batch ran out of batches, none of which it could train, and the job was over."""
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        interrupt(stage, state)
        with pytest.raises(HostsUpdatedInterrupt), pytest.warns(UserWarning, match="caught HostsUpdatedInterrupt"):
            state._leave(stage.world)
        stage.control.is_interrupted = False
        stage.begin(state)
        state.commit()
        stage.control.is_interrupted = True  # nobody has been told, and the function has ended
        state._leave(stage.world)


def test_in_place_a_step_after_a_swallowed_interrupt_raises_it_again_ahead_of_the_weights() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with on_stage() as stage:
        state = TorchState(model=model, optimizer=optimizer, epoch=0, commit="in_place")
        stage.begin(state)
        interrupt(stage, state)
        state.epoch = 1
        guard = state._keeper.guard  # type: ignore[attr-defined]
        with pytest.raises(HostsUpdatedInterrupt):
            guard._step_of_own(optimizer, (optimizer,), {})
        state.restore()
        assert (state.epoch, stage.control.commit) == (0, CommitId(1, 2))
        stage.control.is_interrupted = False
        stage.begin(state)
        guard._step_of_own(optimizer, (optimizer,), {})


@pytest.mark.parametrize("call", ["commit", "check_host_updates"])
def test_a_commit_in_a_reset_callback_is_refused(call: str) -> None:
    """Only survivors could have made it: every newcomer died of it, with an assertion of this package."""
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        state.register_reset_callbacks([lambda old, new: getattr(state, call)()])
        with pytest.raises(
            TrainingCodeError, match=rf"^{call}\(\) was called in on_reset or in a reset callback: leave it out"
        ):
            stage.begin(state, others=[CommitId(1, 0)])
