"""What ranks tell each other at commits: the row of each, when it is sent, and what they do with those of the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from worker_stage import on_stage

from spark_elastic.data import ElasticDataLoader
from spark_elastic.data.balance import Timing
from spark_elastic.data.tracker import Report
from spark_elastic.errors import HostsUpdatedInterrupt, TrainingCodeError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.reports import SharesChanged
from spark_elastic.worker.state.exchange import Exchanged
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.torch_state import TorchState


def test_a_row_says_what_was_packed_into_it() -> None:
    told = Exchanged(True, 7, -(1 << 40), False, 5, 8, 1500, True, 1 << 50, Report(2, 640, 64, 1 << 60))
    row = told.packed()
    assert all(type(value) is int for value in row)
    assert Exchanged.unpacked(row) == told
    assert Exchanged.unpacked(row).loader.position == 640


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
        assert stage.control.timed == [Timing((share, share), (share, share), (1000, 3000), "rows", 4000, 2 * share, 0)]
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
        assert stage.control.timed == [Timing((20,), (20,), (4000,), "rows", 4000, 20, 0)]


def test_nothing_is_timed_where_the_host_runs_ahead_of_its_device() -> None:
    with on_stage() as stage:
        loader = ElasticDataLoader(range(1000), global_batch_size=20, balance="auto")
        state = TorchState(loader=loader)
        stage.begin(state, others=[None])
        loader.measured = lambda: 1000  # type: ignore[method-assign]
        state.commit()
        assert Exchanged.unpacked(stage.exchanged[-1]).measured == 0


def test_ranks_that_commit_unequally_often_are_told() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state, others=[None])
        stage.peers = lambda mine: [mine, [mine[0], mine[1] - 1, *mine[2:]]]
        state.commit()
        with pytest.raises(TrainingCodeError, match="equally often"):
            state.commit()
