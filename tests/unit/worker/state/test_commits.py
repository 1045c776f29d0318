"""Commits: numbered on each rank, named by generation and index, and interrupted on all ranks at the same one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from worker_stage import Stage, on_stage

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import HostsUpdatedInterrupt, SparkElasticError, TrainingCodeError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.reports import Entered, Metrics, Progress, SharesChanged, Stepped
from spark_elastic.worker.reporting import Reporter
from spark_elastic.worker.state.exchanged import Exchanged
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


def test_commits_of_short_steps_share_exchanges_where_gradients_are_reduced() -> None:
    with on_stage() as stage:
        state, now = ObjectState(), [0.0]
        stage.clock = lambda: now[0]
        stage.begin(state, others=[None])
        stage.peers, stage.has_met = lambda mine: [mine, mine], True
        for _ in range(40):
            now[0] += 0.001
            state.commit()
        # That of 32 is due because fingerprints are compared there.
        assert [index for _, index, *_ in stage.exchanged] == [*range(1, 18), 25, 32, 40]


def test_a_commit_without_a_reduction_ahead_of_it_has_an_exchange() -> None:
    with on_stage() as stage:
        state, now = ObjectState(), [0.0]
        stage.clock = lambda: now[0]
        stage.begin(state, others=[None])
        stage.peers = lambda mine: [mine, mine]
        for number in range(1, 24):
            now[0] += 0.001
            stage.has_met = number != 21
            state.commit()
        assert [index for _, index, *_ in stage.exchanged] == [*range(1, 18), 21]


def test_all_ranks_are_interrupted_at_the_commit_after_the_exchange_that_rank_0_has_named() -> None:
    with on_stage() as stage:
        state, now = ObjectState(), [0.0]
        stage.clock = lambda: now[0]
        stage.begin(state, rank=1, others=[None])
        stage.peers, stage.has_met = lambda mine: [[*mine[:5], 3, *mine[6:]], mine], True
        for number in range(1, 23):
            now[0] += 0.001
            stage.control.is_interrupted = number > 19  # which this rank first tells at the exchange of commit 22
            state.commit()
        with pytest.raises(HostsUpdatedInterrupt):
            state.commit()
        assert [index for _, index, *_ in stage.exchanged] == [1, 2, 4, 7, 8, 11, 14, 16, 19, 22]
        assert stage.control.commit == CommitId(1, 23)


def test_the_rows_of_an_epoch_are_proved_at_its_last_step() -> None:
    with on_stage() as stage:
        loader = SimpleNamespace(steps_left=20, report=lambda: (0, 0, 0, 0), confirm=lambda reports: None)
        state, now = ObjectState(), [0.0]
        state._loader_in_use = lambda: loader  # type: ignore[method-assign]
        stage.clock = lambda: now[0]
        stage.begin(state)
        stage.has_met = True
        for _ in range(20):
            now[0] += 0.001
            loader.steps_left -= 1
            state.commit()
        assert [index for _, index, *_ in stage.exchanged] == [*range(1, 18), 20]


def with_measured(row: list[int], microseconds: int) -> list[int]:
    return Exchanged.unpacked(row)._replace(measured=microseconds).packed()


def test_shares_follow_the_speeds_that_all_ranks_have_told_at_one_commit() -> None:
    with on_stage() as stage:
        loader = ElasticDataLoader(range(1000), global_batch_size=20, balance="auto")
        state = TorchState(loader=loader)
        stage.begin(state, others=[None])
        stage.world.group.runs_ahead = False
        loader.measured = lambda: 1000  # type: ignore[method-assign]
        stage.peers = lambda mine: [mine, with_measured(mine, 3000)]
        state.commit()
        assert loader.tracker.shares == ()
        state.commit()
        assert loader.tracker.shares == (14, 6)
        assert stage.control.reported[-1] == SharesChanged(2, [10, 10], [14, 6], [0.001, 0.003])
        stage.begin(state, others=[None])
        assert loader.tracker.shares == ()


@pytest.mark.parametrize(("sizes", "share"), [({"global_batch_size": 20}, 10), ({"batch_size": 1}, 1)])
def test_rank_0_tells_the_driver_what_all_ranks_have_timed(sizes: dict[str, int], share: int) -> None:
    with on_stage() as stage:
        loader = ElasticDataLoader(range(1000), **sizes)
        state = TorchState(loader=loader)
        stage.begin(state, others=[None])
        stage.world.group.runs_ahead = False
        loader._stopwatch.microseconds = lambda: 1000  # type: ignore[method-assign]
        loader._stopwatch.period = lambda: 4000  # type: ignore[method-assign]
        stage.peers = lambda mine: [mine, with_measured(mine, 3000)]
        state.commit()
        state.commit()
        assert Exchanged.unpacked(stage.exchanged[-1]).measured == 1000
        assert stage.control.timed == [((share, share), (1000, 3000), 4000, 2 * share)]
        assert loader.tracker.shares == (), "shares stay even without balance"
        assert [each for each in stage.control.reported if isinstance(each, SharesChanged)] == []


def test_a_rank_that_is_alone_tells_how_long_whole_steps_take() -> None:
    with on_stage() as stage:
        loader = ElasticDataLoader(range(1000), global_batch_size=20)
        state = TorchState(loader=loader)
        stage.begin(state)
        stage.world.group.runs_ahead = False
        loader._stopwatch.period = lambda: 4000  # type: ignore[method-assign]
        state.commit()
        state.commit()
        assert stage.control.timed == [((20,), (4000,), 4000, 20)]


def test_nothing_is_timed_where_the_host_runs_ahead_of_its_device() -> None:
    with on_stage() as stage:
        loader = ElasticDataLoader(range(1000), global_batch_size=20, balance="auto")
        state = TorchState(loader=loader)
        stage.begin(state, others=[None])
        loader.measured = lambda: 1000  # type: ignore[method-assign]
        state.commit()
        assert Exchanged.unpacked(stage.exchanged[-1]).measured == 0


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
