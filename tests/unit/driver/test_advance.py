"""What has become possible: the abort of the devices' group, the end of a vote and of a plain function."""

from __future__ import annotations

from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.protocol.messages import CommitId


def test_the_devices_group_is_aborted_once_when_all_ranks_have_told_what_they_had_completed() -> None:
    """The abort of one could complete a reduction of another with nonsense, before that one has looked."""
    script = running("a", "b", "c")
    script.kill(2)
    commit = CommitId(1, 0)
    assert script.send(ev.WorkerAborted(0, 1, commit)).of(do.AbortDevice) == []
    assert script.send(ev.WorkerAborted(1, 1, commit)).of(do.AbortDevice) == [do.AbortDevice(1, (0, 1))]
    assert script.send(ev.WorkerAborted(1, 1, commit)).of(do.AbortDevice) == []


def test_the_devices_group_is_not_aborted_where_nothing_has_broken() -> None:
    script = running("a", "b")
    told = script.since(lambda: [script.send(ev.WorkerAborted(worker, 1, CommitId(1, 0))) for worker in (0, 1)])
    assert told.commands == []


def test_the_abort_of_the_devices_group_does_not_wait_for_ranks_that_are_lost_or_ready() -> None:
    script = running("a", "b", "c", "d")
    script.kill(3)
    script.ready(2, "a connection broke")
    script.send(ev.WorkerAborted(0, 1, CommitId(1, 0)))
    assert script.since(lambda: script.kill(1)).of(do.AbortDevice) == [do.AbortDevice(1, (0, 2))]


def test_the_devices_group_is_aborted_for_voters_that_a_planned_interrupt_calls_back() -> None:
    """What they had enqueued last may wait for ranks that have been interrupted."""
    script = running("a", "b")
    script.vote(0)
    script.drain(1)
    script.ready(1)
    told = script.send(ev.WorkerAborted(0, 1, CommitId(1, 0)))
    assert told.of(do.AbortDevice) == [do.AbortDevice(1, (0, 1))]


def test_a_plain_job_survives_the_loss_of_a_host_long_after_start_timeout() -> None:
    script = Script(min_np=2, start_timeout=50)
    script.register("a", slot=0)
    script.register("b", slot=1)
    for worker in (0, 1):
        script.send(ev.WorkerConnected(worker))
        script.processes[worker].phase = "booting"
    script.pass_time(100)
    script.lose_host(1)
    script.pass_time(2)
    assert script.error is None, "API.md: a lost worker runs it again"
    script.register("b", slot=1)
    script.send(ev.WorkerConnected(2))
    script.deliver(0, 2, elastic=False)
    assert script.finished


def test_a_drain_does_not_throw_the_result_of_a_plain_function_away() -> None:
    script = Script(min_np=2)
    script.register("a")
    script.register("b")
    for worker in (0, 1):
        script.send(ev.WorkerConnected(worker))
    script.send(ev.ResultArrived(0, False))
    script.drain(0)
    script.deliver(1, elastic=False)
    assert script.outcome == do.FinishJob((0, 1))


def test_voters_called_back_by_a_planned_interrupt_are_no_failure() -> None:
    script = running("a", "b", reset_limit=0)
    script.join("c")
    script.commit()
    script.vote(0)
    script.ready(1)
    script.come_back(0, reason="other ranks were interrupted")
    assert script.error is None
    assert script.generation == 2
