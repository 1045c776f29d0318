"""What workers say, and which of it counts."""

from __future__ import annotations

from typing import Any

import pytest
from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.failures import FirstSign
from spark_elastic.protocol.messages import Activity, CommitId
from spark_elastic.protocol.records import WorkerExited, WorkerLost, WorkerRaised


def test_an_abort_answered_by_a_commit_of_another_generation_is_ignored() -> None:
    script = running("a", "b")
    script.kill(1)
    script.send(ev.WorkerAborted(0, 7, CommitId(7, 7)))
    script.come_back()
    assert script.worlds[-1].members[0].commit == CommitId(1, 0)


def test_a_rank_that_cannot_get_ready_before_the_abort_says_that_its_world_is_broken() -> None:
    script = running("a", "b")
    assert script.send(ev.WorldBroken(1, 7, "of another generation")).commands == []
    assert script.send(ev.WorldBroken(5, 1, "of nobody")).commands == []
    told = script.send(ev.WorldBroken(1, 1, "a connection ended"))
    assert told.commands == [do.AbortWorld(1, (0, 1), "rank 1 reports: a connection ended")]
    assert script.send(ev.WorldBroken(0, 1, "a connection ended")).commands == []


def test_step_times_of_a_world_that_has_lost_a_rank_are_ignored() -> None:
    script = running("a", "b")
    script.commit()
    script.send(ev.WorkerGone(1, FirstSign.PROCESS_DIED))
    for _ in range(20):
        assert script.send(ev.StepsTimed(0, 1, (10, 10), (1000, 9000))).commands == []
    script.come_back()
    assert script.error is None


def test_exceptions_of_newcomers_do_not_condemn_a_job_that_commits() -> None:
    script = running("a", "b")
    script.commit()
    bad = script.register("c")
    for _ in range(3):
        worker = script.worker_on(bad)
        script.send(ev.WorkerConnected(worker))
        script.raises(worker, error="FileNotFoundError: /data", where="train.py:3")
        script.commit()
        script.pass_time(5)
    script.kill(1)
    script.come_back()
    assert script.error is None


def test_crashes_of_newcomers_do_not_condemn_a_job_that_commits() -> None:
    script = running("a", "b")
    script.commit()
    script.register("c")
    for _ in range(10):
        worker = script.newest
        script.send(ev.WorkerConnected(worker))
        script.kill(worker, code=-11)
        script.commit()
        script.pass_time(20)
    script.kill(1)
    script.come_back()
    assert script.error is None


@pytest.mark.parametrize("kind", [ev.WorkerHeard, ev.WorkerAborted, ev.WorkerReady])
def test_a_commit_counts_only_where_a_member_of_the_world_names_it(kind: type) -> None:
    """Else a confused newcomer would make all look lost who hold the newest commit."""
    script = Script(min_np=1, num_proc=1)
    member: Any = script.worker_on(script.register("a"))
    script.boot(member)
    newcomer: Any = script.worker_on(script.register("b"))
    script.send(ev.WorkerConnected(newcomer))
    newest = CommitId(script.generation, 99)
    counters = (Activity(1), 0) if kind is ev.WorkerHeard else ()
    script.send(kind(newcomer, script.generation, *counters, newest))
    script.kill(member)
    script.boot(newcomer)
    assert script.error is None


def test_a_result_before_training_has_finished_is_no_result() -> None:
    script = running("a", "b", max_np=3)
    newcomer = script.worker_on(script.register("c"))
    assert newcomer is not None
    script.send(ev.ResultArrived(newcomer, elastic=True))
    script.boot(newcomer)
    script.pass_time(1.0)
    script.obey_interrupt()
    assert script.ranks == [0, 1, newcomer]


def test_what_a_worker_has_raised_and_printed_is_recorded() -> None:
    script = running("a", "b", "c")
    script.commit()
    worker = script.ranks[1]
    script.raises(worker)
    error, traceback = "ValueError: bad row", "Traceback …\nValueError: bad row"
    assert script.recorded(WorkerRaised) == [WorkerRaised(worker, 1, error, traceback)]
    kinds = [type(record) for record in script.records]
    assert kinds.index(WorkerRaised) < kinds.index(WorkerLost)
    assert [record.last_lines for record in script.recorded(WorkerExited)] == [["last words"]]


def test_an_injected_fault_is_the_cause_of_one_end() -> None:
    script = running("a", "b", "c")
    worker = script.ranks[1]
    script.send(ev.FaultStruck(worker, "kill(rank=1, step=5)"))
    script.kill(worker)
    script.kill(script.ranks[0])
    meanings = [record.meaning for record in script.recorded(WorkerExited)]
    assert "by the injected fault kill(rank=1, step=5)" in meanings[0]
    assert "injected" not in meanings[1]
