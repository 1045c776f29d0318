"""The machine's corners: what the reference scenarios do not ask, and what was found in review."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from machine_script import Script, reform, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.machine import NOTED_BY
from spark_elastic.driver.setbacks import LOST_WORLDS_LIMIT
from spark_elastic.errors import JobCancelledError, RanksDifferError, StateLostError, TrainingFailedError
from spark_elastic.protocol.messages import Activity, CommitId
from spark_elastic.protocol.records import StateLost

# ---------------------------------------------------------------- durable checkpoints


def lose_all(script: Script) -> None:
    """All members die; their hosts start workers anew, which form the next world if the job goes on."""
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


# ---------------------------------------------------------------- commits and repair


def test_the_world_is_told_who_holds_which_commit() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.commit(0)
    script.kill(2)
    script.come_back()
    assert [member.commit for member in script.worlds[-1].members] == [CommitId(1, 2), CommitId(1, 1)]


def test_a_newcomer_holds_no_commit() -> None:
    script = running("a")
    script.join("b")
    script.obey_interrupt()
    assert [member.commit for member in script.worlds[-1].members] == [CommitId(1, 1), None]


def test_commits_are_ordered_by_generation_first() -> None:
    script = running("a", "b", "c")
    for _ in range(5):
        script.commit()
    script.kill(2)
    reform(script)
    script.kill(1)
    script.come_back()
    assert script.worlds[-1].members[0].commit == CommitId(2, 1)


def test_the_newest_commit_may_be_the_youngest_workers() -> None:
    script = running("a", "b", "c", max_np=3)
    script.commit()
    script.commit(2)
    script.drain(2, deadline=script.now)
    script.send(ev.Tick())
    script.come_back()
    assert script.ranks == [0, 1, 2]


def test_a_drained_holder_of_the_newest_commit_hands_it_on_and_leaves_then() -> None:
    script = running("a", "b", "c", max_np=3)
    script.commit()
    script.commit(2)
    script.drain(2, deadline=script.now)
    script.send(ev.Tick())
    script.come_back()
    script.acknowledge()
    script.obey_interrupt()
    assert script.ranks == [0, 1]


def test_a_drained_holder_of_the_state_stays_until_the_next_world_holds_it_too() -> None:
    """Found by simulation: the only other holder died while it handed the state on to a newcomer."""
    script = running("a", "b", min_np=2, max_np=2)
    script.commit()
    newcomer = script.join("c", wait=False)
    script.drain(1)
    script.obey_interrupt()
    assert script.ranks == [0, newcomer]
    for worker in script.ranks:  # connected, but the newcomer has nothing yet
        script.send(ev.GroupFormed(worker, script.generation))
    script.kill(0)
    script.come_back()
    assert (script.error, script.ranks) == (None, [1, newcomer])


def test_a_drained_holder_of_the_state_goes_on_alone_when_all_of_the_next_world_are_lost() -> None:
    script = running("a", "b", max_np=2)
    script.commit()
    script.drain(1)
    script.obey_interrupt()
    script.kill(0)
    assert (script.error, script.ranks) == (None, [1])
    assert script.worlds[-1].members[0].commit == CommitId(1, 2)


def test_the_old_size_is_that_of_the_world_that_made_the_newest_commit() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.kill(2)
    script.come_back()
    script.kill(1)
    script.come_back()
    assert [world.previous_size for world in script.worlds] == [0, 3, 3]


def test_an_abort_answered_by_a_commit_of_another_generation_is_ignored() -> None:
    script = running("a", "b")
    script.kill(1)
    script.send(ev.WorkerAborted(0, 7, CommitId(7, 7)))
    script.come_back()
    assert script.worlds[-1].members[0].commit == CommitId(1, 0)


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


def test_a_rank_that_cannot_get_ready_before_the_abort_says_that_its_world_is_broken() -> None:
    script = running("a", "b")
    assert script.send(ev.WorldBroken(1, 7, "of another generation")).commands == []
    assert script.send(ev.WorldBroken(5, 1, "of nobody")).commands == []
    told = script.send(ev.WorldBroken(1, 1, "a connection ended"))
    assert told.commands == [do.AbortWorld(1, (0, 1), "rank 1 reports: a connection ended")]
    assert script.send(ev.WorldBroken(0, 1, "a connection ended")).commands == []


# ---------------------------------------------------------------- the entrance


def test_every_event_is_noted_by_a_function_of_its_own() -> None:
    assert set(NOTED_BY) == set(get_args(ev.Event))
    assert len(set(NOTED_BY.values())) == len(NOTED_BY)


def test_cancelling_ends_the_job_once() -> None:
    machine = running("a").machine
    assert [
        type(command) for command in machine.cancel(JobCancelledError("stop")) if not isinstance(command, do.Record)
    ] == [
        do.FailJob,
        do.ReleaseTask,
    ]
    assert machine.cancel(JobCancelledError("again")) == []


def test_an_exit_after_the_end_still_explains_the_failure() -> None:
    script = running("a", "b")
    script.vote()
    script.send(ev.WorkerGone(1, FirstSign.CONNECTION_BROKE))
    assert script.outcome is not None
    script.exits(1, -11)
    assert "SIGSEGV" in str(script.job.book.failures[1])


# ---------------------------------------------------------------- found in review: each of these is a bug


def test_the_next_deadline_is_never_in_the_past_while_a_newcomer_waits_for_one_that_boots() -> None:
    script = running("a")
    early, late = script.register("b"), script.register("c")
    script.send(ev.WorkerConnected(script.worker_on(late)))
    script.boot(script.worker_on(early))
    script.pass_time(2)
    deadline = script.machine.deadline()
    assert deadline is None or deadline > script.now, "the driver's loop would spin until the other has booted"


def test_the_next_deadline_is_never_in_the_past_while_a_vote_is_out() -> None:
    script = running("a", "b")
    script.vote(0)
    script.join("c")
    deadline = script.machine.deadline()
    assert deadline is None or deadline > script.now, "the driver's loop would spin until the last rank votes"


def test_the_next_deadline_is_never_in_the_past_while_the_world_is_full() -> None:
    script = running("a", "b", max_np=2)
    script.join("c")
    deadline = script.machine.deadline()
    assert deadline is None or deadline > script.now


def test_there_is_no_next_deadline_after_the_end() -> None:
    """The service asks after every event: a deadline in the past would have its loop spin while tasks are on their way out."""
    script = running("a", "b")
    script.join("c", wait=False)
    script.machine.cancel(JobCancelledError("Ctrl-C"))
    script.now += 1
    script.send(ev.TaskHeard(0))
    assert script.machine.deadline() is None


def test_a_planned_interrupt_may_wait_for_its_commit_longer_than_elastic_timeout() -> None:
    script = running("a", "b", elastic_timeout=60)
    script.commit()
    script.join("c")
    script.pass_time(200, busy=True)
    assert script.error is None
    script.obey_interrupt()
    assert len(script.ranks) == 3


def test_survivors_that_are_enough_are_not_short_of_hosts() -> None:
    script = running("a", "b", "c", elastic_timeout=40, ready_timeout=30)
    script.kill(2)
    script.come_back(0)
    script.pass_time(100, busy=True)
    assert script.error is None


def test_work_after_a_finish_that_followed_an_interrupt_may_take_longer_than_elastic_timeout() -> None:
    script = running("a", "b", elastic_timeout=60)
    script.join("c")
    script.vote(0, 1)
    script.pass_time(100)
    assert script.error is None
    script.deliver(0, 1)
    assert script.finished


def test_a_hang_while_an_interrupt_is_out_is_found() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.join("c")
    script.processes[0].collectives += 1
    told = script.since(lambda: script.pass_time(60))
    assert do.KillWorker(1, 1) in told.commands


def test_a_hang_before_the_commit_at_which_the_others_were_interrupted_is_found() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.join("c")
    script.commit()
    script.ready(0)
    told = script.since(lambda: script.pass_time(60))
    assert do.KillWorker(1, 1) in told.commands


def test_a_hang_is_found_also_when_all_others_were_lost_after_they_had_been_interrupted() -> None:
    script = running("a", "b", durable=True, hang_timeout=50)
    script.commit()
    script.drain(0)
    script.obey_interrupt(0)
    script.lose_host(0)
    script.join("c", wait=False)
    assert script.since(lambda: script.pass_time(49)).of(do.AbortWorld) == []
    told = script.since(lambda: script.pass_time(3))
    # It holds the newest commit that is left, and may itself wait for those who are gone: first it is called back.
    assert [abort.workers for abort in told.of(do.AbortWorld)] == [(1,)]
    assert script.since(lambda: script.pass_time(597)).of(do.KillWorker) == []
    assert script.since(lambda: script.pass_time(6)).of(do.KillWorker) == [do.KillWorker(1, 1)]
    assert script.ranks == [2]


def test_a_rank_that_waits_for_others_lost_after_they_had_been_interrupted_is_called_back_and_goes_on() -> None:
    """Found by the simulation: their last reduction had not reached it, and it was given up with the state."""
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.drain(0)
    script.obey_interrupt(0)
    script.lose_host(0)
    script.join("c", wait=False)
    script.pass_time(52)
    script.come_back(1)
    assert script.error is None
    assert script.ranks == [1, 2]


def test_a_hang_after_the_last_collective_while_all_others_have_voted_is_found() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.vote(0)
    told = script.since(lambda: script.pass_time(120))
    assert do.KillWorker(1, 1) in told.commands


def test_a_hang_of_the_rank_that_is_to_hand_the_state_on_costs_that_rank_and_not_the_job() -> None:
    """The others wait for its word in the control store, so no rank has entered a collective."""
    script = running("a", "b", hang_timeout=50, ready_timeout=20)
    script.kill(1)
    script.come_back()
    script.acknowledge()
    script.join("c")
    script.obey_interrupt(0)
    for worker in script.ranks:
        script.send(ev.GroupFormed(worker, script.generation))
    told = script.since(lambda: script.pass_time(102))
    assert [command.workers for command in told.of(do.AbortWorld)] == [tuple(script.ranks)]
    assert script.error is None


def test_who_waits_for_the_state_is_not_taken_out_with_the_rank_that_hangs_before_handing_it_on() -> None:
    script = running("a", "b", hang_timeout=50, ready_timeout=20)
    script.commit()
    newcomer = script.join("c")
    script.obey_interrupt()
    for worker in script.ranks:
        script.send(ev.GroupFormed(worker, script.generation))
    holder = script.processes[1]
    holder.commit, holder.collectives = CommitId(2, 0), 1
    script.pass_time(102)
    script.come_back(1, newcomer)
    script.pass_time(102)
    assert script.ranks == [1, newcomer]
    assert script.error is None


# ---------------------------------------------------------------- the last holders of the newest commit


def in_long_code(*names: str, **settings: Any) -> Script:
    """A world in which the last rank is lost while all others are in long code without a collective."""
    script = running(*names, **settings)
    script.commit()
    script.kill(len(names) - 1)
    return script


def test_the_last_holder_is_waited_for_in_long_code_as_long_as_for_any_worker() -> None:
    script = in_long_code("a", "b", hang_timeout=30, ready_timeout=10, elastic_timeout=200)
    assert do.KillWorker(0, 0) not in script.since(lambda: script.pass_time(199)).commands
    script.come_back(0)
    assert script.ranks[0] == 0
    assert script.error is None


def test_a_heartbeat_of_the_last_holder_restarts_its_time() -> None:
    script = in_long_code("a", "b", hang_timeout=30, elastic_timeout=60)
    script.pass_time(50)
    script.pass_time(1, busy=True)
    assert do.KillWorker(0, 0) not in script.since(lambda: script.pass_time(59)).commands
    assert script.error is None


def test_a_last_holder_that_never_comes_back_ends_the_job_and_is_told_what_to_call() -> None:
    script = in_long_code("a", "b", hang_timeout=30, elastic_timeout=60)
    script.pass_time(62)
    assert isinstance(script.error, StateLostError)
    assert "60 s after a reset (elastic_timeout, as nobody else held the newest commit; call state.heartbeat()" in str(
        script.error
    )


def test_a_last_holder_that_never_comes_back_is_replaced_from_the_durable_checkpoint() -> None:
    script = in_long_code("a", "b", hang_timeout=30, elastic_timeout=60, durable=True)
    script.pass_time(62)
    assert script.error is None
    assert len(script.recorded(StateLost)) == 1


def test_holders_that_are_all_late_are_all_waited_for_until_one_is_back() -> None:
    script = in_long_code("a", "b", "c", hang_timeout=30, elastic_timeout=200)
    assert script.since(lambda: script.pass_time(100)).of(do.KillWorker) == []
    script.come_back(1)
    assert do.KillWorker(0, 0) in script.since(lambda: script.pass_time(1)).commands
    assert script.ranks == [1]


def test_a_drain_whose_deadline_passes_in_long_code_costs_nobody_else() -> None:
    script = running("a", "b", hang_timeout=30, ready_timeout=10, elastic_timeout=200)
    script.commit()
    script.drain(1, deadline=script.now + 20)
    script.pass_time(25)
    script.lose_host(1, reason="its executor was decommissioned")
    assert script.since(lambda: script.pass_time(100)).of(do.KillWorker) == []
    script.come_back(0)
    assert (script.error, script.ranks) == (None, [0])


def test_a_last_holder_that_is_silent_for_a_while_is_waited_for() -> None:
    """Its machine may have been paused, or cut off for a minute: when it is gone, its connection breaks."""
    script = running("a", "b", heartbeat_timeout=20, elastic_timeout=200)
    script.commit()
    assert script.since(lambda: script.pass_time(100, silent={0, 1})).of(do.KillWorker) == []
    script.pass_time(10)
    assert (script.error, script.job.setbacks.resets) == (None, 0)


def test_ranks_that_the_driver_does_not_hear_are_not_judged_by_what_they_said_before() -> None:
    """Found by simulation: their network to the driver was cut off while one rank had returned from the function."""
    script = running("a", "b", heartbeat_timeout=20, hang_timeout=10, elastic_timeout=200)
    script.commit()
    script.commit(0)
    script.vote(1)
    script.pass_time(100, silent={0, 1})
    assert script.error is None


def test_who_falls_silent_a_moment_later_is_no_proof_that_the_state_is_safe() -> None:
    """Found by simulation: two ranks on a machine that was paused, whose last words came a moment apart."""
    script = running("a", "b", heartbeat_timeout=20, elastic_timeout=200)
    script.commit()
    script.pass_time(2, silent={0})
    assert script.since(lambda: script.pass_time(60, silent={0, 1})).of(do.KillWorker) == []
    assert script.error is None


def test_a_silent_rank_of_a_broken_world_is_replaced_once_another_is_back_with_the_state() -> None:
    """Found by simulation: who had not come back yet had changed its weights in place, and nothing to go back to."""
    script = running("a", "b", "c", heartbeat_timeout=20, hang_timeout=100)
    script.commit()
    script.kill(2)
    assert do.KillWorker(0, 0) not in script.since(lambda: script.pass_time(30, silent={0})).commands
    script.come_back(1)
    assert do.KillWorker(0, 0) in script.since(lambda: script.pass_time(1, silent={0})).commands
    assert script.ranks == [1]


def test_a_silent_last_holder_is_given_up_after_elastic_timeout() -> None:
    script = running("a", heartbeat_timeout=20, elastic_timeout=60)
    script.commit()
    script.pass_time(62, silent={0})
    assert isinstance(script.error, StateLostError)


def test_a_host_that_does_not_answer_keeps_its_task_while_its_worker_is_the_last_holder() -> None:
    script = running("a", heartbeat_timeout=20, elastic_timeout=200)
    script.commit()
    script.hosts.clear()  # whose tasks answer pings no more, while the worker sends heartbeats
    assert script.since(lambda: script.pass_time(100)).commands == []
    script.heartbeat(0)


def test_a_silent_rank_is_replaced_at_once_where_another_holds_the_state() -> None:
    script = running("a", "b", heartbeat_timeout=20, elastic_timeout=200)
    script.commit()
    told = script.since(lambda: script.pass_time(22, silent={1}))
    assert told.of(do.KillWorker) == [do.KillWorker(1, 1)]


# ---------------------------------------------------------------- newcomers


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


def test_a_drained_worker_that_nobody_can_replace_is_not_interrupted_at_every_commit() -> None:
    script = running("a", min_np=1)
    script.drain(0)
    for _ in range(5):
        if script.job.world.phase.name == "INTERRUPTING":
            script.obey_interrupt()
            if script.generation > 1:
                script.acknowledge()
        else:
            script.commit()
    assert len(script.worlds) <= 2


def test_a_drained_host_that_goes_while_too_few_are_left_is_no_failure() -> None:
    script = running("a", "b", min_np=2, reset_limit=0)
    script.drain(1)
    script.obey_interrupt()
    script.lose_host(1)
    assert script.error is None
    assert script.job.setbacks.resets == 0


def test_a_drain_deadline_holds_also_after_the_driver_was_paused() -> None:
    script = running("a", "b")
    script.now += 60
    script.send(ev.Tick())
    script.drain(1, deadline=script.now + 5)
    told = script.since(lambda: script.pass_time(7))
    assert len(told.of(do.AbortWorld)) == 1


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


def test_a_worker_that_does_not_start_is_replaced_before_the_job_gives_up_waiting() -> None:
    script = running("a", "b", min_np=2, elastic_timeout=100)
    script.commit()
    script.kill(1)
    script.come_back()
    script.pass_time(52)
    script.end_those_told()
    assert script.worker_on(1) == 3
    script.boot(3)
    assert script.ranks == [0, 3]


def wait_in_collectives(script: Script, *counts: int) -> None:
    """All members are in collectives that do not complete; each has entered so many more."""
    for worker, count in zip(script.living, counts, strict=True):
        script.processes[worker].waiting = True
        script.processes[worker].collectives += count


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 1)], ids=["in the same", "one has come further"])
def test_a_collective_that_all_have_entered_and_that_does_not_complete_breaks_the_world_and_blames_nobody(
    counts: tuple[int, ...],
) -> None:
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    wait_in_collectives(script, *counts)
    assert script.since(lambda: script.pass_time(49)).commands == []
    told = script.since(lambda: script.pass_time(3))
    assert [command.workers for command in told.of(do.AbortWorld)] == [(0, 1, 2)]
    assert "not complete after 50 s" in script.job.world.broken_by
    reform(script)
    assert script.ranks == [0, 1, 2]


def test_long_code_on_all_ranks_without_a_collective_breaks_nothing() -> None:
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    assert script.since(lambda: script.pass_time(5000)).commands == []


def test_a_slow_collective_whose_bytes_come_is_waited_for() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    wait_in_collectives(script, 1, 1)
    for _ in range(10):
        script.processes[1].moved += 1000
        assert script.since(lambda: script.pass_time(40)).commands == []


def test_a_rank_that_waits_in_what_is_not_counted_while_the_other_computes_breaks_the_world_and_blames_nobody() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    wait_in_collectives(script, 0, 0)
    script.processes[1].waiting = False
    told = script.since(lambda: script.pass_time(52))
    assert told.of(do.KillWorker) == []
    (abort,) = told.of(do.AbortWorld)
    assert "ranks [0] had waited for 50 s (hang_timeout) in a transfer, or in a collective of a group" in abort.reason


def test_a_rank_that_computes_while_others_wait_for_it_is_blamed_though_others_wait_in_what_it_has_entered() -> None:
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    wait_in_collectives(script, 1, 1, 0)
    script.processes[2].waiting = False
    told = script.since(lambda: script.pass_time(52))
    assert told.of(do.KillWorker) == [do.KillWorker(2, 2)]


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


def compare_change(script: Script, *entered: int, changed: set[int]) -> None:
    """Each rank has entered so many collectives; the ``changed`` have made a change that they compare in their fifth."""
    for worker, collectives in zip(script.living, entered, strict=True):
        done = (1, 5, "Net.head.weight began to require a gradient") if worker in changed else ()
        activity = Activity(collectives, True, 0, 0, *done)
        script.send(ev.WorkerHeard(worker, script.generation, activity, 0, script.processes[worker].commit))
    script.send(ev.Tick())


def test_a_change_that_one_rank_has_made_alone_ends_the_job_at_once_and_is_named() -> None:
    script = running("a", "b", "c", hang_timeout=300)
    script.commit()
    compare_change(script, 5, 5, 5, changed={0, 2})
    assert isinstance(script.error, RanksDifferError)
    assert "Net.head.weight began to require a gradient on ranks [0, 2] only, of 3" in str(script.error)
    assert "ranks [1] went on without that" in str(script.error)


@pytest.mark.parametrize(("entered", "changed"), [((5, 4, 4), {0}), ((9, 5, 6), {0, 1, 2})])
def test_who_has_not_come_to_a_change_yet_or_has_made_it_and_gone_on_does_not_differ(
    entered: tuple[int, ...], changed: set[int]
) -> None:
    script = running("a", "b", "c", hang_timeout=300)
    script.commit()
    compare_change(script, *entered, changed=changed)
    assert script.error is None


def test_worlds_that_get_stuck_now_and_then_with_commits_between_end_nothing() -> None:
    script = running("a", "b", hang_timeout=50)
    for _ in range(10):
        script.commit()
        get_stuck(script)
    assert script.error is None


def test_a_result_that_does_not_come_while_those_of_the_others_have_come_ends_the_job_by_name() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.vote()
    script.deliver(0)
    script.pass_time(40)
    script.send(ev.ResultFlowed(1))
    script.pass_time(40, busy=True)
    script.pass_time(49)
    assert script.error is None
    script.pass_time(3)
    assert isinstance(script.error, TrainingFailedError)
    assert "rank 1 was lost after training had finished" in str(script.error)
    assert "its result had not come 50 s after" in str(script.error)


def test_long_code_after_the_elastic_function_on_all_ranks_is_nobodys_hang() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.vote()
    script.pass_time(1000)
    script.deliver()
    assert script.finished


def test_the_worker_of_a_silent_host_is_fenced() -> None:
    script = running("a", "b", heartbeat_timeout=20)
    script.hosts.pop(1)
    told = script.since(lambda: script.pass_time(22))
    ended = [command.worker for command in told.of(do.KillWorker) + told.of(do.LeaveJob)]
    assert 1 in ended, "its own connection is open: it waits for a world until the job ends"


def test_a_worker_whose_process_is_seen_is_not_silent_while_one_long_call_keeps_its_python_from_speaking() -> None:
    script = running("a", "b", heartbeat_timeout=20)
    assert script.since(lambda: script.pass_time(100, silent={0, 1}, seen={0, 1})).commands == []
    told = script.since(lambda: script.pass_time(22, silent={0, 1}, seen={0}))
    assert told.of(do.KillWorker) == [do.KillWorker(1, 1)], "its process was stopped after all"


def test_a_worker_that_never_connects_is_replaced_though_its_process_is_seen() -> None:
    script = Script(min_np=1, start_timeout=60)
    script.register("a")
    told = script.since(lambda: script.pass_time(32, seen={0}))
    assert told.of(do.KillWorker) == [do.KillWorker(0, 0)]


def test_hosts_that_drain_are_no_hosts_to_begin_with() -> None:
    script = Script(min_np=2, start_timeout=40, yield_after=1000)
    for name in "ab":
        script.drain(script.register(name))
    script.end_those_told()
    script.pass_time(100)
    assert script.error is not None, "nobody can train, and nobody is told"


def test_nothing_but_releases_follows_the_end_of_the_job() -> None:
    script = running("a", "b", "c", reset_limit=0, heartbeat_timeout=20)
    script.pass_time(25, silent={1, 2})
    assert script.error is not None


def test_voters_called_back_by_a_planned_interrupt_are_no_failure() -> None:
    script = running("a", "b", reset_limit=0)
    script.join("c")
    script.commit()
    script.vote(0)
    script.ready(1)
    script.come_back(0, reason="other ranks were interrupted")
    assert script.error is None
    assert script.generation == 2


def test_a_rank_that_raises_the_interrupt_by_itself_does_not_leave_the_others_waiting_for_ever() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.ready(0)
    told = script.since(lambda: script.pass_time(200))
    assert told.of(do.AbortWorld) or told.of(do.KillWorker)


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


# ---------------------------------------------------------------- any schedule


class AnySchedule(RuleBasedStateMachine):
    """Any order of legal events; ``Script`` checks every command, the invariants here look at the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script(
            min_np=2, max_np=4, num_proc=2, start_timeout=60, elastic_timeout=60, hang_timeout=30, yield_after=20,
            ready_timeout=15, form_timeout=15,
        )  # fmt: skip

    def pick(self, number: int, phases: set[str]) -> int | None:
        fitting = [p.worker for p in self.script.processes.values() if p.phase in phases]
        return fitting[number % len(fitting)] if fitting else None

    @precondition(lambda self: len(self.script.hosts) < 5)
    @rule(name=st.sampled_from("abc"))
    def register(self, name: str) -> None:
        used = {host.slot for host in self.script.job.hosts}
        free = [slot for slot in range(5) if slot not in used]
        if free:  # tasks that were told to restart may still hold theirs
            self.script.register(name, slot=free[0])

    @rule(number=st.integers(0, 9))
    def boot(self, number: int) -> None:
        worker = self.pick(number, {"starting"})
        if worker is not None:
            self.script.boot(worker)

    @rule(number=st.integers(0, 9))
    def acknowledge(self, number: int) -> None:
        worker = self.pick(number, {"forming"})
        if worker is not None:
            self.script.send(ev.GroupFormed(worker, self.script.processes[worker].generation))
            process = self.script.processes[worker]
            process.phase, process.commit = "training", CommitId(process.generation, 0)
            self.script.heartbeat(worker)

    @rule()
    def acknowledge_all(self) -> None:
        for number in range(len(self.script.processes)):
            self.acknowledge(number)
            self.acknowledge(0)

    @rule(number=st.integers(0, 9))
    def commit_one(self, number: int) -> None:
        worker = self.pick(number, {"training"})
        if worker is not None:
            self.script.commit(worker)

    @rule(number=st.integers(0, 9), planned=st.booleans())
    def come_back(self, number: int, planned: bool) -> None:
        worker = self.pick(number, {"training", "forming", "voted"})
        world = self.script.job.world
        if worker is None or world is None or self.script.processes[worker].generation != world.generation:
            return
        if world.phase.name == "BREAKING" or (world.phase.name == "INTERRUPTING" and planned):
            self.script.ready(worker, "" if world.phase.name == "INTERRUPTING" else "a peer was lost")

    @rule()
    def all_come_back(self) -> None:
        for number in range(len(self.script.processes)):
            self.come_back(number, True)
            self.come_back(0, True)

    @rule(number=st.integers(0, 9))
    def vote(self, number: int) -> None:
        worker = self.pick(number, {"training"})
        if worker is not None:
            self.script.vote(worker)

    @rule(number=st.integers(0, 9))
    def result(self, number: int) -> None:
        world = self.script.job.world
        worker = self.pick(number, {"voted"})
        if worker is not None and world is not None and world.phase.name == "FINISHING":
            self.script.deliver(worker)

    @rule(number=st.integers(0, 9), code=st.sampled_from([-9, -11, 0, 1]))
    def kill(self, number: int, code: int) -> None:
        if self.script.processes:
            workers = list(self.script.processes)
            self.script.kill(workers[number % len(workers)], code=code)

    @rule(number=st.integers(0, 9), line=st.integers(0, 9))
    def raise_error(self, number: int, line: int) -> None:
        worker = self.pick(number, {"booting", "training"})
        if worker is not None:
            self.script.raises(worker, where=f"train.py:{line}")

    @rule()
    def end_those_told(self) -> None:
        self.script.end_those_told()

    @precondition(lambda self: self.script.hosts)
    @rule(number=st.integers(0, 9))
    def lose_host(self, number: int) -> None:
        hosts = list(self.script.hosts)
        self.script.lose_host(hosts[number % len(hosts)])

    @precondition(lambda self: self.script.hosts)
    @rule(number=st.integers(0, 9), deadline=st.none() | st.integers(0, 20))
    def drain(self, number: int, deadline: int | None) -> None:
        hosts = list(self.script.hosts)
        self.script.drain(hosts[number % len(hosts)], None if deadline is None else self.script.now + deadline)

    @rule(number=st.integers(0, 9), generation=st.integers(0, 5))
    def say_something_stale(self, number: int, generation: int) -> None:
        stale = [ev.GroupFormed, ev.WorkerAborted, ev.WorkerReturned, ev.WorkerReady, ev.WorldBroken]
        if generation < self.script.job.generation:
            kind = stale[number % len(stale)]
            rest = {ev.GroupFormed: (), ev.WorldBroken: ("a connection ended",)}.get(kind, (CommitId(generation, 1),))
            worker = number if kind is not ev.WorkerReady else 10**6
            self.script.send(kind(worker, generation, *rest))

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0]), mute=st.integers(-3, 9))
    def pass_time(self, seconds: float, mute: int) -> None:
        self._forget_released()
        self.script.pass_time(seconds, step=0.5, silent={mute})

    @rule()
    def pause_the_driver(self) -> None:
        self.script.now += 1000
        self.script.send(ev.Tick())

    def _forget_released(self) -> None:
        """Tasks that were released or restarted are gone before long."""
        for host in [host for host in self.script.hosts if self.script.job.hosts.get(host) is None]:
            self.script.lose_host(host)

    @invariant()
    def the_machine_is_consistent(self) -> None:
        job = self.script.job
        self._forget_released()
        for host in job.hosts:
            if host.worker in job.workers:
                assert job.workers[host.worker].host == host.host
        world = job.world
        if world is not None and not job.over and world.phase.name == "RUNNING":
            assert len(world.members) == len([w for w in world.workers if w in job.workers])

    def teardown(self) -> None:
        """Given hosts that stay up and workers that do their work, every job ends."""
        script = self.script
        script.end_those_told()
        for host in [host.host for host in script.job.hosts if host.draining]:
            script.lose_host(host)
        for _ in range(60):
            if script.outcome is not None:
                return
            self._forget_released()
            while len(script.hosts) < 4:
                self.register("d")
            for process in list(script.processes.values()):
                if process.phase in ("starting", "booting"):
                    script.boot(process.worker)
            self.all_come_back()
            self.acknowledge_all()
            world = script.job.world
            if world is not None and world.phase.name == "RUNNING":
                script.vote(*[w for w in script.living if script.processes[w].phase == "training"])
            elif world is not None and world.phase.name == "FINISHING":
                script.deliver()
            script.end_those_told()
            script.pass_time(2, busy=True)
        raise AssertionError(f"the job does not end: {script.job.world}, {script.job.workers}")


AnySchedule.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestAnySchedule = AnySchedule.TestCase


# ---------------------------------------------------------------- what is not theirs to say


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


def test_a_rank_that_waits_for_the_abort_of_the_devices_group_is_not_late_and_what_it_holds_counts() -> None:
    """Found by the simulation: one was killed, one stopped for ever, and the third could not come back before that answered."""
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    script.kill(1)
    script.send(ev.WorkerAborted(0, script.generation, CommitId(script.generation, 1)))
    told = script.since(lambda: script.pass_time(62))
    assert told.of(do.KillWorker) == [do.KillWorker(2, 2)]
    assert len(told.of(do.AbortDevice)) == 1
    assert script.since(lambda: script.pass_time(50)).of(do.KillWorker) == []
    script.come_back(0)
    assert script.ranks == [0]
