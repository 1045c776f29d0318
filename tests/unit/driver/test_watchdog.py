"""Who is late, stuck or silent, and who is not."""

from __future__ import annotations

from typing import Any

import pytest
from machine_script import Script, reform, running, wait_in_collectives

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.errors import RanksDifferError, StateLostError, TrainingFailedError
from spark_elastic.protocol.messages import COMMIT, Activity, CommitId
from spark_elastic.protocol.records import StateLost, WorkerLost


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


def test_a_rank_that_waits_for_one_lost_rank_is_called_back_although_another_one_holds_the_commit() -> None:
    """Found by the simulation, with a GPU: the rank was replaced as hung, though only the lost rank's last words were missing."""
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    script.drain(0)
    script.obey_interrupt(0)
    script.obey_interrupt(2)
    script.lose_host(0)
    told = script.since(lambda: script.pass_time(52))
    assert told.of(do.KillWorker) == []
    assert [abort.workers for abort in told.of(do.AbortWorld)] == [(1,)]
    script.come_back(1)
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


def test_a_rank_that_cannot_tell_that_it_has_the_state_is_replaced_if_the_others_wait_for_it_in_a_collective() -> None:
    """It keeps Python's lock from its first step on."""
    script = running("a", "b", "c", "d", hang_timeout=50)
    script.kill(3)
    script.come_back()
    for worker in script.ranks:
        script.send(ev.GroupFormed(worker, script.generation))
    wait_in_collectives(script, 1, 1, 0)
    for rank, worker in enumerate(script.ranks):
        process = script.processes[worker]
        process.waiting, process.commit = rank != 2, CommitId(2, 0)
    told = script.since(lambda: script.pass_time(102, silent={2}, seen={2}))
    assert told.of(do.KillWorker) == [do.KillWorker(2, 2)]


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


def test_long_code_on_all_ranks_that_a_loss_sent_back_to_its_beginning_breaks_nothing() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.kill(1)
    script.come_back()
    script.acknowledge()
    script.pass_time(300)
    assert script.error is None
    assert script.ranks == [0]


def test_a_first_world_in_which_nobody_commits_ends_the_job_and_is_told_what_to_call() -> None:
    script = running("a", "b", hang_timeout=50)
    script.pass_time(110)
    assert isinstance(script.error, TrainingFailedError)
    assert "no worker reached a commit" in str(script.error)


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
    assert "while ranks [1] computed; call state.heartbeat() in long code, or raise hang_timeout" in abort.reason


def compute_on_the_first_while_the_others_wait_in_a_group_of_the_users_own(script: Script) -> None:
    wait_in_collectives(script, *(0 for _ in script.living))
    script.processes[script.ranks[0]].waiting = False


@pytest.mark.parametrize("elastic", [True, False])
def test_a_rank_that_computes_for_long_while_others_wait_in_a_group_of_their_own_is_kept_by_its_heartbeat(
    elastic: bool,
) -> None:
    script = running("a", "b", "c", hang_timeout=50, min_np=3, max_np=3, elastic=elastic)
    script.commit()
    compute_on_the_first_while_the_others_wait_in_a_group_of_the_users_own(script)
    for _ in range(10):
        script.processes[script.ranks[0]].beats += 1
        assert script.since(lambda: script.pass_time(40)).commands == []


def test_a_job_that_ends_as_ranks_wait_for_one_that_computes_says_what_helps_and_asks_nothing() -> None:
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    for _ in range(3):
        compute_on_the_first_while_the_others_wait_in_a_group_of_the_users_own(script)
        script.pass_time(103)
        if script.outcome is None:
            script.come_back()
            script.acknowledge()
    assert isinstance(script.error, TrainingFailedError)
    assert "while ranks [0] computed; call state.heartbeat() in long code" in str(script.error)
    assert "same collectives" not in str(script.error)


def test_a_rank_that_computes_while_others_wait_for_it_is_blamed_though_others_wait_in_what_it_has_entered() -> None:
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    wait_in_collectives(script, 1, 1, 0)
    script.processes[2].waiting = False
    told = script.since(lambda: script.pass_time(52))
    assert told.of(do.KillWorker) == [do.KillWorker(2, 2)]


def wait_in(script: Script, *recent: tuple[str, ...], frozen: dict[int, str] | None = None) -> None:
    """All members wait; these are the last collectives that each has entered, and in ``frozen`` nothing requires a gradient."""
    wait_in_collectives(script, *(5 for _ in recent))
    for worker, names in zip(script.living, recent, strict=True):
        script.processes[worker].recent = names
        script.processes[worker].frozen = (frozen or {}).get(worker, "")


ADRIFT = (("broadcast", "allreduce", "allreduce"), ("broadcast", "allreduce", COMMIT))


@pytest.mark.parametrize("frozen", [{}, {0: "Net"}, {0: "Net", 1: "Net"}])
def test_ranks_that_wait_in_different_collectives_are_named(frozen: dict[int, str]) -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    wait_in(script, *ADRIFT, frozen=frozen)
    (abort,) = script.since(lambda: script.pass_time(52)).of(do.AbortWorld)
    assert (
        "different collectives for 50 s (hang_timeout): allreduce on ranks [0], state.commit() on ranks [1]"
        in abort.reason
    )


def test_a_rank_that_went_on_because_it_alone_has_frozen_all_ends_the_job_and_is_named() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    wait_in(script, *ADRIFT, frozen={1: "Net"})
    script.pass_time(52)
    assert isinstance(script.error, RanksDifferError)
    assert "nothing of Net requires a gradient on ranks [1] only, of 2" in str(script.error)


@pytest.mark.parametrize("recent", [(("a", "b"), ("a", "b")), (("b",), ("a", "b")), ((), ("a",))])
def test_ranks_that_wait_in_the_same_collective_as_far_as_is_known_are_not_told_apart(recent: Any) -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    wait_in(script, *recent)
    (abort,) = script.since(lambda: script.pass_time(52)).of(do.AbortWorld)
    assert "all ranks had entered a collective" in abort.reason


def test_ranks_that_commit_a_little_in_each_world_and_then_wait_in_different_collectives_end_the_job() -> None:
    script = running("a", "b", hang_timeout=50)
    for _ in range(3):
        script.commit()
        wait_in(script, *ADRIFT)
        script.pass_time(52)
        if script.outcome is None:
            reform(script)
    assert isinstance(script.error, TrainingFailedError)
    assert "3 worlds in a row got stuck; in the last one ranks had waited in different collectives" in str(script.error)


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


def test_long_code_after_the_elastic_function_on_all_ranks_is_not_a_hang() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.vote()
    script.pass_time(1000)
    script.deliver()
    assert script.finished


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


def test_a_rank_that_raises_the_interrupt_by_itself_does_not_leave_the_others_waiting_for_ever() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.ready(0)
    told = script.since(lambda: script.pass_time(200))
    assert told.of(do.AbortWorld) or told.of(do.KillWorker)


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


@pytest.mark.parametrize(("hang", "ready", "told"), [(5, 40, "ready_timeout"), (40, 5, "hang_timeout")])
def test_who_does_not_come_back_is_told_which_limit_was_passed(hang: int, ready: int, told: str) -> None:
    script = in_long_code("a", "b", "c", hang_timeout=hang, ready_timeout=ready)
    script.come_back(1)
    script.pass_time(90)
    (lost,) = [record for record in script.recorded(WorkerLost) if record.worker == 0]
    assert f"after a reset ({told}; call state.heartbeat()" in lost.cause
