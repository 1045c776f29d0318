"""Losses: who is replaced, when the next world begins from a checkpoint, and what ends the job."""

from __future__ import annotations

from typing import Any

import pytest
from machine_script import Script, running, wait_in_collectives

from spark_elastic.driver import commands as do
from spark_elastic.driver.losses import EXPLAIN_SECONDS, RAISE_SECONDS
from spark_elastic.driver.setbacks import LOST_WORLDS_LIMIT
from spark_elastic.errors import ResetLimitExceededError, StateLostError, TrainingFailedError
from spark_elastic.protocol.messages import CommitId


def lose_all(script: Script) -> None:
    """All members die; their hosts start new workers, which form the next world if the job goes on."""
    script.kill(*script.living)
    script.pass_time(60)
    script.boot(*(process.worker for process in script.processes.values() if process.phase == "starting"))


def test_a_job_with_a_checkpoint_goes_on_when_all_workers_are_lost() -> None:
    script = running("a", "b", min_np=2, durable=True)
    script.commit()
    lose_all(script)
    world = script.worlds[-1]
    assert [member.commit for member in world.members] == [None, None]
    assert (world.generation, world.previous_size) == (2, 0)
    script.acknowledge()
    script.commit()
    script.vote()
    script.deliver()
    assert script.finished


def test_a_job_that_loses_all_workers_again_and_again_without_a_commit_fails() -> None:
    script = running("a", durable=True)
    for _ in range(2):
        script.commit()
        for _ in range(LOST_WORLDS_LIMIT):
            lose_all(script)
            script.acknowledge()
    assert script.outcome is None
    script.kill(*script.living)
    assert isinstance(script.error, StateLostError)
    assert "with no commit since the checkpoint" in str(script.error)


def test_a_drained_holder_of_the_state_goes_on_alone_when_all_of_the_next_world_are_lost() -> None:
    script = running("a", "b", max_np=2)
    script.commit()
    script.drain(1)
    script.obey_interrupt()
    script.kill(0)
    assert (script.error, script.ranks) == (None, [1])
    assert script.worlds[-1].members[0].commit == CommitId(1, 2)


def test_a_drained_host_that_goes_while_too_few_are_left_is_no_failure() -> None:
    script = running("a", "b", min_np=2, reset_limit=0)
    script.drain(1)
    script.obey_interrupt()
    script.lose_host(1)
    assert script.error is None
    assert script.job.setbacks.resets == 0


def test_ranks_that_report_again_and_again_that_they_cannot_connect_are_replaced() -> None:
    script = Script(min_np=2, num_proc=2, start_timeout=10_000)
    script.register("a")
    script.register("b")
    script.boot(0, 1)
    for _ in range(20):
        if script.job.over or any(process.told_to_end for process in script.processes.values()):
            return
        script.come_back(0, 1, reason="the group could not be built: connection refused")
    pytest.fail(f"generation {script.generation}: forms and breaks for ever, without a pause")


def get_stuck(script: Script, *silent: int) -> Any:
    """The present world gets stuck; return what is told, after which whoever is left forms the next."""
    wait_in_collectives(script, *(1 for _ in script.living))
    for worker, count in zip(script.living, silent, strict=False):
        script.processes[worker].silent = count
    told = script.since(lambda: script.pass_time(103))
    if script.outcome is None:
        script.come_back()
        script.acknowledge()
    return told


def test_who_does_not_answer_is_replaced_when_a_second_world_gets_stuck() -> None:
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    assert get_stuck(script, 1, 2, 1).of(do.KillWorker) == []
    assert get_stuck(script, 1, 2, 1).of(do.KillWorker) == [do.KillWorker(1, 1)]
    assert script.error is None


def test_of_two_that_do_not_hear_each_other_the_younger_is_replaced() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    get_stuck(script, 1, 1)
    assert get_stuck(script, 1, 1).of(do.KillWorker) == [do.KillWorker(1, 1)]


def test_a_program_whose_ranks_wait_for_each_other_again_and_again_ends_loudly() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    for _ in range(2):
        get_stuck(script)
        assert script.error is None
    get_stuck(script)
    assert isinstance(script.error, TrainingFailedError)
    assert "same collectives in the same order" in str(script.error)


def test_worlds_that_get_stuck_now_and_then_with_commits_between_end_nothing() -> None:
    script = running("a", "b", hang_timeout=50)
    for _ in range(10):
        script.commit()
        get_stuck(script)
    assert script.error is None


def test_a_job_whose_workers_can_never_connect_to_each_other_ends() -> None:
    script = Script(min_np=2, num_proc=2, form_timeout=10, start_timeout=100, yield_after=10_000)
    script.register("a")
    script.register("b")
    script.boot(0, 1)
    for _ in range(60):
        script.pass_time(20)
        if script.outcome is not None:
            return
        script.end_those_told()
        script.come_back()
        script.boot(*(process.worker for process in list(script.processes.values()) if process.phase == "starting"))
    pytest.fail(f"after {script.now - 100:.0f} s, in generation {script.generation}, nobody has been told")


def test_a_mistake_on_all_ranks_ends_the_job_although_they_come_to_it_one_after_the_other() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.raises(1)
    script.pass_time(RAISE_SECONDS * 0.9)
    script.raises(0)
    assert not any(isinstance(command, do.AbortWorld) for command in script.told)
    script.raises(2)
    assert str(script.error).startswith("all 3 workers of the world raised")
    assert len(script.worlds) == 1


def test_the_others_are_called_back_as_soon_as_they_had_the_time_to_raise_the_same() -> None:
    script = running("a", "b", "c")
    script.commit()
    assert script.since(lambda: script.raises(1)).of(do.AbortWorld) == []
    assert script.machine.deadline() == pytest.approx(script.now + RAISE_SECONDS)
    told = script.since(lambda: script.pass_time(RAISE_SECONDS))
    assert [command.workers for command in told.of(do.AbortWorld)] == [(0, 2)]
    assert script.since(lambda: script.pass_time(5)).of(do.AbortWorld) == []


def test_a_worker_that_dies_meanwhile_ends_the_wait_for_others_to_raise() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.raises(1)
    assert [command.workers for command in script.since(lambda: script.kill(2)).of(do.AbortWorld)] == [(0,)]


def test_who_comes_back_while_others_may_still_raise_is_not_called_back() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.raises(1)
    script.ready(0, "a connection ended")
    told = script.since(lambda: script.pass_time(RAISE_SECONDS))
    assert [command.workers for command in told.of(do.AbortWorld)] == [(2,)]
    script.come_back()
    assert script.ranks[:2] == [0, 2]


def test_a_failure_names_every_worker() -> None:
    script = running("a", "b", reset_limit=0)
    script.raises(1)
    assert isinstance(script.error, TrainingFailedError)
    assert "rank 1 (worker 1) on b: raised ValueError: bad row" in str(script.error)


def test_a_worker_that_was_fenced_is_not_said_to_have_run_out_of_memory() -> None:
    script = Script(min_np=2, num_proc=3, form_timeout=10)
    for name in "abc":
        script.register(name)
    script.boot(0, 1, 2)
    for _ in range(3):
        script.acknowledge(0, 1)
        script.pass_time(12)
        script.come_back()
    script.end_those_told()
    assert "could not connect" in script.job.book.failures[2].cause


def test_the_error_of_a_reset_limit_names_the_lost_rank_although_a_survivor_has_reported_its_end_first() -> None:
    script = running("a", "b", reset_limit=0)
    script.commit()
    script.ready(0, "connection closed by peer")
    assert script.error is None
    script.kill(1)
    assert isinstance(script.error, ResetLimitExceededError)
    assert "the last one: rank 1 on b was lost: killed by SIGKILL" in str(script.error)
    assert [failure.worker for failure in script.error.failures] == [1]


def test_a_reset_limit_does_not_wait_long_for_a_loss_that_nobody_hears_of() -> None:
    script = running("a", "b", reset_limit=0)
    script.commit()
    script.ready(0, "connection closed by peer")
    script.pass_time(EXPLAIN_SECONDS - 1)
    assert script.error is None
    script.pass_time(2)
    assert "the last one: rank 0 reports: connection closed by peer" in str(script.error)


def test_a_reset_limit_ends_a_stuck_job_at_once_and_says_that_it_was_stuck() -> None:
    script = running("a", "b", "c", reset_limit=0, hang_timeout=30)
    script.commit()
    wait_in_collectives(script, 1, 1, 1)
    script.pass_time(40)
    assert isinstance(script.error, ResetLimitExceededError)
    assert "collective" in str(script.error)


def test_a_reset_limit_ends_a_job_whose_world_broke_without_a_loss_once_all_have_come_back() -> None:
    script = running("a", "b", reset_limit=0)
    script.commit()
    script.ready(0, "connection closed by peer")
    assert script.error is None
    script.come_back()
    assert isinstance(script.error, ResetLimitExceededError)
    assert "the last one: rank 0 reports: connection closed by peer" in str(script.error)
