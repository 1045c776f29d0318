"""The driver of a fixed world: a loss ends all of its workers, and all of the function runs again in new ones."""

from __future__ import annotations

from typing import Any

from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.errors import ResetLimitExceededError, TrainingFailedError
from spark_elastic.protocol.records import WorkerLost


def fixed(*names: str, **settings: Any) -> Script:
    size = len(names)
    script = running(*names, min_np=size, max_np=size, elastic=False, **settings)
    for process in script.processes.values():
        process.commit = None  # plain functions make none
    return script


def run_again(script: Script) -> None:
    """What is left of the old world exits, and new workers boot and form the next one."""
    script.end_those_told()
    script.pass_time(1.0)
    script.boot(*script.processes)
    script.acknowledge()


def test_a_loss_ends_all_workers_and_a_new_world_of_the_same_size_forms_of_new_ones() -> None:
    script = fixed("a", "b", "c")
    told = script.since(lambda: script.kill(1))
    assert [command.worker for command in told.of(do.KillWorker)] == [1, 0, 2]
    run_again(script)
    assert (script.generation, len(script.ranks)) == (2, 3)
    assert min(script.ranks) > 2
    assert script.worlds[-1].previous_size == 0


def test_a_new_world_waits_until_all_workers_of_the_old_one_have_exited() -> None:
    script = fixed("a", "b")
    script.kill(1)
    script.pass_time(5.0)
    script.boot(*(worker for worker in script.processes if worker > 1))
    assert script.generation == 1
    assert 0 in script.processes


def test_a_world_of_one_runs_again() -> None:
    script = fixed("a")
    script.kill(0)
    run_again(script)
    script.vote()
    script.deliver()
    assert script.finished


def test_commits_do_not_make_a_loss_of_all_a_loss_of_the_state() -> None:
    script = fixed("a", "b")
    script.commit()
    script.kill(0, 1)
    run_again(script)
    assert script.error is None
    assert script.generation == 2


def test_reset_limit_zero_means_that_nothing_runs_again() -> None:
    script = fixed("a", "b", reset_limit=0)
    script.kill(1)
    assert isinstance(script.error, ResetLimitExceededError)


def test_reset_limit_counts_what_runs_again() -> None:
    script = fixed("a", "b", reset_limit=1)
    script.kill(1)
    run_again(script)
    assert script.error is None
    script.kill(script.ranks[0])
    assert isinstance(script.error, ResetLimitExceededError)


def test_survivors_that_report_the_loss_first_run_again_too() -> None:
    script = fixed("a", "b")
    script.ready(0, "Connection closed by peer")
    script.kill(1)
    run_again(script)
    assert script.generation == 2


def test_too_few_hosts_are_told_by_the_only_size_that_such_a_job_is_given() -> None:
    script = Script(elastic=False, min_np=4, num_proc=4, max_np=4, start_timeout=40, yield_after=1000)
    script.join("a")
    script.pass_time(60)
    said = str(script.error)
    assert "only 1 of num_proc=4 hosts had registered after 40 s" in said
    assert "for num_proc=4 tasks? Lower num_proc, or raise start_timeout." in said
    assert "_np" not in said


def test_an_exception_ends_the_job() -> None:
    script = fixed("a", "b")
    script.send(ev.WorkerRaised(1, "ValueError: bad row", "train.py:7", "Traceback …", True))
    assert script.told[-1] == do.KillWorker(script.host_of(1), 1)
    script.exits(1, -9)
    assert isinstance(script.error, TrainingFailedError)
    assert "bad row" in str(script.error)


def test_a_loss_before_the_last_result_has_arrived_runs_again() -> None:
    script = fixed("a", "b")
    script.vote()
    script.deliver(0)
    script.kill(1)
    run_again(script)
    script.vote()
    script.deliver()
    assert script.finished
    assert min(script.outcome.workers) > 1  # type: ignore[union-attr]


def test_a_host_that_drains_and_one_that_comes_interrupt_nothing() -> None:
    script = fixed("a", "b")
    told = script.since(lambda: script.drain(0))
    script.register("c")
    script.pass_time(30.0)
    assert not told.of(do.InterruptWorld)
    script.vote()
    script.deliver()
    assert script.finished


def test_a_rank_that_does_not_enter_a_collective_hangs() -> None:
    script = fixed("a", "b", hang_timeout=5.0)
    script.processes[0].collectives = 3
    script.processes[1].collectives = 2
    told = script.since(lambda: script.pass_time(8.0))
    assert 1 in [command.worker for command in told.of(do.KillWorker)]
    assert [lost.worker for lost in script.recorded(WorkerLost)] == [1]


def test_code_without_collectives_may_take_any_time_also_when_others_have_returned() -> None:
    script = fixed("a", "b", hang_timeout=5.0)
    script.pass_time(100.0)
    script.vote(1)
    script.pass_time(100.0)
    assert script.error is None
    assert not script.recorded(WorkerLost)


def test_a_rank_that_returned_while_another_waits_for_it_fails_the_job() -> None:
    script = fixed("a", "b", hang_timeout=5.0)
    script.vote(1)
    script.processes[0].collectives = 1
    script.pass_time(8.0)
    assert "ranks [1] returned while others waited" in str(script.error)


def test_a_silent_world_is_not_waited_for_as_its_last_holders() -> None:
    script = fixed("a", "b")
    script.commit()
    script.pass_time(22.0, silent=(0, 1))
    assert {lost.worker for lost in script.recorded(WorkerLost)} >= {0}
    run_again(script)
    assert script.error is None
    assert script.generation == 2
