"""JobState: the steps by which what is known of a job changes, and the order of what they have done."""

from __future__ import annotations

import pytest
from machine_script import running

from spark_elastic.driver import commands as do
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.phases import IllegalTransition, WorldChange, WorldPhase
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import JobCancelledError, TrainingFailedError
from spark_elastic.protocol.messages import CommitId, Member


def test_commands_are_handed_over_once_and_in_order() -> None:
    job = JobState(JobSettings(min_np=1, num_proc=1, max_np=1), 0.0)
    job.order(do.LeaveJob(2), do.LeaveJob(1))
    job.order(do.YieldSlots())
    assert job.take_commands() == [do.LeaveJob(2), do.LeaveJob(1), do.YieldSlots()]
    assert job.take_commands() == []


def test_a_job_ends_with_the_first_error_and_lets_all_tasks_go() -> None:
    job = running("a", "b").job
    error = TrainingFailedError("first", ())
    job.fail(error)
    assert [command for command in job.take_commands() if not isinstance(command, do.Record)] == [
        do.FailJob(error),
        do.ReleaseTask(0),
        do.ReleaseTask(1),
    ]
    job.fail(JobCancelledError("second"))
    assert job.take_commands() == []


def test_a_world_begins_where_the_one_before_can_end() -> None:
    job = running("a").job
    member = Member(0, 0, 0, 1, 0, 1, None)
    with pytest.raises(IllegalTransition, match="FOLLOWED"):
        job.begin_world((member,))
    job.change_world(WorldChange.BROKE)
    before = job.world
    assert before is not None
    after = job.begin_world((member,))
    assert before.phase is WorldPhase.OVER
    assert (job.world, job.generation, job.ranks) == (after, 2, {0: 0})
    assert job.sizes == {1: 1, 2: 1}


def test_what_was_trained_is_forgotten_with_the_world_that_nobody_is_left_of() -> None:
    script = running("a")
    script.commit()
    job = script.job
    assert job.newest_commit == CommitId(1, 1)
    job.change_world(WorldChange.BROKE)
    job.drop_world(WorldChange.LOST)
    assert (job.world, job.newest_commit, job.generation, dict(job.ranks)) == (None, None, 1, {})


def test_an_older_commit_than_the_one_that_a_worker_is_known_to_hold_changes_nothing() -> None:
    script = running("a")
    script.commit()
    script.job.note_commit(script.job.workers[0], CommitId(1, 0))
    assert script.job.workers[0].commit == script.job.newest_commit == CommitId(1, 1)


def test_a_world_has_come_further_once_all_ranks_have_made_a_commit_or_one_a_second_which_takes_all() -> None:
    script = running("a", "b")
    job, (first, second) = script.job, script.job.workers.values()
    assert job.world is not None
    job.note_commit(first, CommitId(1, 1))
    assert not job.world.progressed, "the other may have failed in that step"
    job.note_commit(second, CommitId(1, 1))
    assert job.world.progressed

    job = running("a", "b").job
    assert job.world is not None
    job.note_commit(job.workers[0], CommitId(1, 2))
    assert job.world.progressed
