"""Which commits of a ShardedState a rank offers after a loss, and to which of them it goes back."""

from __future__ import annotations

import pytest
import torch
from one_rank_sharded import held_again, slices, train, values
from worker_stage import Stage

from spark_elastic import ShardedState
from spark_elastic.errors import StateLostError, WorkerLostError
from spark_elastic.protocol.messages import CommitId


def lose_at_the_meeting(stage: Stage, state: ShardedState) -> None:
    def lost() -> None:
        raise WorkerLostError("rank 1")

    stage.world.meet = lost
    with pytest.raises(WorkerLostError):
        state.commit()


def test_a_commit_for_which_not_all_have_met_is_offered_beside_the_one_before(
    stage: Stage, begun: ShardedState
) -> None:
    train(begun)
    wanted = values(begun)
    stage.has_met = True
    lose_at_the_meeting(stage, begun)
    begun.restore()
    assert slices(begun) == [CommitId(1, 2), CommitId(1, 1)]
    held_again(stage, begun)
    assert all(map(torch.equal, values(begun), wanted))
    assert begun.steps == 2


def test_the_one_before_is_gone_back_to_where_the_driver_says_so(stage: Stage, begun: ShardedState) -> None:
    committed = values(begun)
    train(begun)
    stage.has_met = True
    lose_at_the_meeting(stage, begun)
    begun.restore()
    stage.control.commit = CommitId(1, 1)
    stage.begin(begun, slices=stage.control.slices[1])
    assert all(map(torch.equal, values(begun), committed))
    assert begun.steps == 1


def test_a_commit_whose_tensors_have_changed_since_the_meeting_failed_is_not_offered(
    stage: Stage, begun: ShardedState
) -> None:
    train(begun)
    stage.has_met = True
    lose_at_the_meeting(stage, begun)
    with torch.no_grad():
        next(begun.model.parameters()).mul_(2.0)
    begun.restore()
    assert slices(begun) == [CommitId(1, 1)]


def test_a_rank_that_lost_shards_does_not_begin_the_job_anew(stage: Stage, begun: ShardedState) -> None:
    begun.restore()
    stage.control.commit = None
    with pytest.raises(
        StateLostError, match=r"fully sharded.*shards .* lost with all ranks.*written by torch\.distributed\.checkpoint"
    ):
        stage.begin(begun)
