"""The scenarios that the incumbents' own suites cover, as far as they are decisions of the driver's machine."""

from __future__ import annotations

import pytest
from machine_script import Script, reform, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.hosts import Place
from spark_elastic.driver.job_state import EXIT_SECONDS
from spark_elastic.errors import (
    DataError,
    NotEnoughHostsError,
    ResetLimitExceededError,
    StateLostError,
    TrainingFailedError,
)
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.records import DriverPaused, WorldFormed


def shape(script: Script) -> list[tuple[int, int, int, int, int]]:
    """(rank, local rank, local size, cross rank, cross size) of the newest world."""
    return [(m.rank, m.local_rank, m.local_size, m.cross_rank, m.cross_size) for m in script.worlds[-1].members]


# ---------------------------------------------------------------- ranks


def test_two_hosts_with_two_slots_each_are_ranked_machine_by_machine() -> None:
    script = running("a", "b", "a", "b")
    assert script.ranks == [0, 2, 1, 3]
    assert shape(script) == [(0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (2, 0, 2, 1, 2), (3, 1, 2, 1, 2)]


def test_uneven_slots_at_five_workers() -> None:
    script = running("a", "b", "b", "c", "c", "c", min_np=5, num_proc=5, max_np=5)
    assert shape(script) == [(0, 0, 1, 0, 3), (1, 0, 2, 1, 3), (2, 1, 2, 0, 2), (3, 0, 2, 2, 3), (4, 1, 2, 1, 2)]


def test_the_order_of_age_is_kept_when_the_oldest_dies_and_others_join() -> None:
    script = running("a", "b", "c")
    script.kill(0)
    reform(script)
    assert script.ranks == [1, 2]
    script.pass_time(1.0)
    script.boot(script.worker_on(0))
    script.pass_time(1.0)
    script.obey_interrupt()
    assert script.ranks == [1, 2, 3]


# ---------------------------------------------------------------- beginnings


def test_a_host_lost_before_forming_is_complete_starts_another_world() -> None:
    script = Script(min_np=2, num_proc=3)
    hosts = [script.register(name) for name in "abc"]
    script.boot(0, 1, 2)
    script.acknowledge(0, 1)
    told = script.since(lambda: script.lose_host(hosts[2]))
    assert told.of(do.AbortWorld)[0].workers == (0, 1)
    script.come_back()
    assert (script.generation, script.ranks) == (2, [0, 1])


def test_a_late_acknowledgement_of_a_broken_world_is_ignored() -> None:
    script = Script(min_np=2, num_proc=3)
    hosts = [script.register(name) for name in "abc"]
    script.boot(0, 1, 2)
    script.lose_host(hosts[2])
    script.come_back()
    script.send(ev.GroupFormed(0, 1))
    script.send(ev.GroupFormed(1, 1))
    assert not script.recorded(WorldFormed)


def test_a_host_added_before_the_first_world_takes_part_in_it() -> None:
    script = Script(min_np=1, num_proc=2)
    script.register("a")
    script.boot(0)
    assert script.generation == 0
    script.register("b")
    script.boot(1)
    assert script.ranks == [0, 1]


def test_a_host_added_after_forming_joins_by_an_interrupt() -> None:
    script = running("a", "b")
    told = script.since(lambda: script.join("c"))
    assert told.names() == ["StartWorker", "InterruptWorld"]
    script.obey_interrupt()
    assert script.ranks == [0, 1, 2]
    assert script.worlds[-1].previous_size == 2


def test_a_host_added_while_forming_waits_until_the_world_has_formed() -> None:
    script = Script(min_np=2, num_proc=2)
    script.register("a")
    script.register("b")
    script.boot(0, 1)
    script.join("c")
    assert len(script.worlds) == 1
    script.acknowledge()
    script.obey_interrupt()
    assert script.ranks == [0, 1, 2]


def test_the_job_waits_for_its_minimum_of_slots() -> None:
    script = Script(min_np=2)
    script.join("a")
    script.pass_time(20)
    assert script.worlds == []
    script.join("b")
    assert script.ranks == [0, 1]


def test_waiting_for_the_minimum_of_slots_ends_with_start_timeout() -> None:
    script = Script(min_np=2, start_timeout=40, yield_after=1000)
    script.join("a")
    script.pass_time(60)
    assert isinstance(script.error, NotEnoughHostsError)
    assert "start_timeout" in str(script.error)
    assert "min_np=2" in str(script.error)


def test_no_host_at_all_ends_with_start_timeout() -> None:
    script = Script(min_np=2, start_timeout=40)
    script.pass_time(39)
    assert script.outcome is None
    script.send(ev.SlotGivenUp(0, "ModuleNotFoundError: No module named 'msgspec'"))
    script.pass_time(2)
    assert "0 of min_np=2 hosts had registered" in str(script.error)
    assert "The last slot that was given up: ModuleNotFoundError" in str(script.error)


def test_start_timeout_starts_with_what_is_there_when_that_is_enough() -> None:
    script = Script(min_np=2, num_proc=4, start_timeout=40)
    script.pass_time(3)
    script.join("a")
    script.join("b")
    script.pass_time(40)
    assert script.ranks == [0, 1]
    assert script.outcome is None


def test_a_run_that_holds_too_few_slots_gives_them_back() -> None:
    script = Script(min_np=2, yield_after=30)
    host = script.register("a")
    told = script.since(lambda: script.pass_time(40))
    assert told.of(do.YieldSlots) == [do.YieldSlots()]
    assert do.ReleaseTask(host) in told.commands
    assert script.job.workers == {}


def test_slots_are_held_longer_after_each_time_that_they_were_given_back() -> None:
    script = Script(min_np=2, yield_after=30)
    script.register("a", slot=0)
    script.pass_time(35)
    script.hosts.clear()
    script.processes.clear()
    script.register("a", slot=0)
    told = script.since(lambda: script.pass_time(50))
    assert told.of(do.YieldSlots) == []


def test_a_run_with_enough_slots_keeps_them() -> None:
    script = Script(min_np=2, yield_after=30)
    script.register("a")
    script.register("b")
    assert script.since(lambda: script.pass_time(100)).of(do.YieldSlots) == []


# ---------------------------------------------------------------- losses


def test_a_killed_worker_is_replaced_on_its_host_and_the_others_go_on_without_it() -> None:
    script = running("a", "b", "c", "d")
    script.commit()
    told = script.since(lambda: script.kill(1))
    assert told.commands[0] == do.KillWorker(1, 1)
    assert told.commands[1] == do.AbortWorld(1, (0, 2, 3), told.commands[1].reason)
    assert told.commands[2] == do.StartWorker(1, 4)
    script.come_back()
    assert script.ranks == [0, 2, 3]


def test_running_workers_do_not_wait_for_a_newcomer_to_boot() -> None:
    script = running("a", "b")
    script.kill(1)
    script.come_back()
    assert script.ranks == [0]


def test_all_workers_fail_at_once() -> None:
    script = running("a", "b")
    script.commit()
    script.kill(0, 1)
    assert isinstance(script.error, StateLostError)


def test_one_success_does_not_end_the_others_early() -> None:
    script = running("a", "b", "c")
    told = script.since(lambda: script.vote(0))
    script.pass_time(100)
    assert told.commands == []
    assert script.outcome is None


def test_the_job_finishes_when_all_have_voted_and_all_results_are_there() -> None:
    script = running("b", "a")
    told = script.since(script.vote)
    assert told.commands == [do.FinishWorld(1, (0, 1))]
    script.deliver(1)
    assert script.outcome is None
    script.deliver(0)
    assert script.outcome == do.FinishJob((0, 1))


def test_two_slots_of_a_machine_fail_together() -> None:
    script = running("a", "a", "b", "b")
    script.commit()
    told = script.since(lambda: script.kill(2, 3))
    assert [command.workers for command in told.of(do.AbortWorld)] == [(0, 1, 3)]
    script.come_back()
    assert script.ranks == [0, 1]


def test_a_second_loss_while_recovering_from_the_first_aborts_nobody_twice() -> None:
    script = running("a", "b", "c", "d")
    script.kill(3)
    script.come_back(0)
    told = script.since(lambda: script.kill(2))
    assert told.of(do.AbortWorld) == []
    script.come_back(1)
    assert script.ranks == [0, 1]
    assert script.job.setbacks.resets == 1


def test_every_host_lost_loses_the_state() -> None:
    script = running("a", "b")
    script.commit()
    script.lose_host(0, 1)
    assert isinstance(script.error, StateLostError)
    assert "checkpoint" in str(script.error)


def test_the_only_holder_of_the_state_dies_before_a_newcomer_has_got_it() -> None:
    script = running("a", min_np=1)
    script.commit()
    newcomer = script.join("b")
    script.obey_interrupt(0)
    assert script.ranks == [0, newcomer]
    script.kill(0)
    script.come_back(newcomer)
    assert isinstance(script.error, StateLostError)


def test_survivors_that_were_all_caught_between_step_and_commit_lose_the_state() -> None:
    """Committing in place, such a rank says that it holds nothing, whatever it has reported before."""
    script = running("a", "b", "c")
    script.commit()
    script.kill(2)
    for worker in (0, 1):
        script.processes[worker].commit = None
        script.ready(worker, "a peer was lost")
    assert isinstance(script.error, StateLostError)


def test_a_survivor_that_was_caught_between_step_and_commit_is_no_holder() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.kill(2)
    script.ready(1, "a peer was lost")
    script.processes[0].commit = None
    script.ready(0, "a peer was lost")
    assert [member.commit for member in script.worlds[-1].members] == [None, CommitId(1, 1)]


def test_every_host_lost_before_the_first_world_formed_starts_anew() -> None:
    script = Script(min_np=2)
    script.register("a", slot=0)
    script.register("b", slot=1)
    script.boot(0, 1)
    script.lose_host(0, 1)
    assert script.outcome is None
    script.register("a", slot=0)
    script.register("b", slot=1)
    script.boot(2, 3)
    assert script.ranks == [2, 3]


def test_survivors_below_the_minimum_wait_and_go_on_when_a_host_comes() -> None:
    script = running("a", "b", min_np=2)
    script.commit()
    script.lose_host(1)
    script.come_back()
    script.pass_time(500)
    assert script.generation == 1
    script.join("b", slot=1)
    assert (script.ranks, script.generation) == ([0, 2], 2)


def test_survivors_below_the_minimum_wait_no_longer_than_elastic_timeout() -> None:
    script = running("a", "b", min_np=2, elastic_timeout=60)
    script.lose_host(1)
    script.come_back()
    script.pass_time(59)
    assert script.outcome is None
    script.pass_time(3)
    assert isinstance(script.error, NotEnoughHostsError)
    assert "1 of min_np=2" in str(script.error)
    assert "elastic_timeout" in str(script.error)


def test_a_slot_is_killed_ten_times_and_the_job_goes_on() -> None:
    script = running("a", "b")
    for _ in range(10):
        script.kill(script.worker_on(1))
        reform(script)
        script.pass_time(20)
        script.boot(script.worker_on(1))
        script.pass_time(1)
        script.obey_interrupt()
        script.acknowledge()
        script.commit()
    assert script.outcome is None
    assert len(script.ranks) == 2


# ---------------------------------------------------------------- cooldown


def test_a_place_whose_workers_keep_failing_cools_down_and_returns() -> None:
    script = running("a", "b")
    script.commit()
    script.kill(1)
    reform(script)
    script.kill(2)
    assert script.worker_on(1) is None
    script.pass_time(0.4, step=0.1)
    assert script.worker_on(1) is None
    script.pass_time(0.2, step=0.1)
    assert script.worker_on(1) == 3


def test_a_place_whose_workers_fail_again_and_again_has_its_task_restarted() -> None:
    script = running("a", "b")
    script.commit()
    script.kill(1)
    reform(script)
    told = script.since(lambda: [(script.kill(script.newest), script.pass_time(30)) for _ in range(3)])
    (restart, again) = told.of(do.RestartTask)
    assert (restart.host, again.host) == (1, 2)
    assert "killed by SIGKILL" in restart.reason


# ---------------------------------------------------------------- growing and shrinking


def test_hosts_are_replaced_one_by_one_at_two_workers() -> None:
    script = running("a", "b", max_np=3)
    for name in "cdef":
        oldest = script.ranks[0]
        newcomer = script.join(name)
        script.obey_interrupt()
        script.acknowledge()
        script.commit()
        script.drain(script.host_of(oldest))
        script.obey_interrupt()
        script.acknowledge()
        script.commit()
        assert newcomer in script.ranks
        assert oldest not in script.ranks
        assert len(script.ranks) == 2
        script.lose_host(script.host_of(oldest))
    assert script.job.setbacks.resets == 0


def test_spare_hosts_appear_and_vanish_without_a_reset() -> None:
    script = running("a", "b", max_np=2)
    spare = script.register("c")
    script.boot(script.worker_on(spare))
    told = script.since(lambda: script.pass_time(60))
    script.lose_host(spare)
    assert told.commands == []
    assert script.generation == 1
    assert script.job.setbacks.resets == 0


def test_a_spare_takes_the_place_of_a_lost_worker_at_once() -> None:
    script = running("a", "b", max_np=2)
    spare = script.register("c")
    script.boot(script.worker_on(spare))
    script.kill(1)
    script.come_back()
    assert script.ranks == [0, 2]


def test_one_worker_becomes_two_becomes_three() -> None:
    script = running("a")
    for size in (2, 3):
        script.commit()
        script.join("abc"[size - 1])
        script.obey_interrupt()
        assert len(script.ranks) == size
        assert script.worlds[-1].previous_size == size - 1
        script.acknowledge()


def test_three_workers_become_two_become_one_by_drains() -> None:
    script = running("a", "b", "c")
    for size in (2, 1):
        script.commit()
        told = script.drain(size)
        assert told.names() == ["InterruptWorld"]
        script.obey_interrupt()
        assert script.ranks == list(range(size))
        assert script.since(script.acknowledge).of(do.LeaveJob) == [do.LeaveJob(size)]
    assert script.job.setbacks.resets == 0


def test_four_workers_become_two_by_exceptions_and_four_again() -> None:
    script = running("a", "b", "c", "d")
    for size in (3, 2):
        script.commit()
        script.raises(script.ranks[-1], error=f"ValueError: {size}", where=f"train.py:{size}")
        reform(script)
        assert len(script.ranks) == size
    script.pass_time(2)
    script.boot(*(worker for worker in script.processes if worker not in script.ranks))
    script.pass_time(1)
    script.obey_interrupt()
    assert len(script.ranks) == 4
    assert script.outcome is None


def test_ten_arrivals_within_the_join_window_cause_one_interrupt() -> None:
    script = running("a", max_np=11)
    hosts = [script.register(name) for name in "bcdefghijk"]

    def arrive() -> None:
        for host in hosts:
            script.boot(script.worker_on(host))
            script.pass_time(0.1, step=0.1)
        script.pass_time(2)

    assert script.since(arrive).names() == ["InterruptWorld"]
    script.obey_interrupt()
    assert len(script.ranks) == 11


def test_two_notifications_within_a_second_cause_one_interrupt() -> None:
    script = running("a", "b", "c")
    told = script.since(lambda: (script.drain(1), script.drain(2)))
    assert told.names() == ["InterruptWorld"]
    script.obey_interrupt()
    assert script.ranks == [0]


def test_a_newcomer_that_boots_for_ever_delays_others_no_longer_than_join_patience() -> None:
    script = running("a", join_patience=10.0)
    ready, slow = script.register("b"), script.register("c")
    script.send(ev.WorkerConnected(script.worker_on(slow)))
    script.processes[script.worker_on(slow)].phase = "booting"
    script.boot(script.worker_on(ready))
    assert script.since(lambda: script.pass_time(9)).commands == []
    assert script.since(lambda: script.pass_time(2)).names() == ["InterruptWorld"]


def test_a_drained_worker_leaves_though_too_few_others_are_left_as_it_holds_a_slot() -> None:
    """Spark's decommission waits for the task; without the slot, and with two of two workers ready, all would wait for ever."""
    script = running("a", "b", min_np=2, max_np=2)
    script.drain(1)
    told = script.since(script.obey_interrupt)
    assert told.commands == [do.LeaveJob(1)]
    told = script.since(script.end_those_told)
    assert told.commands == [do.ReleaseTask(1)]
    script.join("c")
    assert (script.ranks, script.generation) == ([0, 2], 2)


def test_a_drained_worker_that_alone_holds_the_newest_commit_waits_for_others_to_give_it_to() -> None:
    script = running("a", "b", min_np=2)
    script.commit()
    script.commit(1)
    script.drain(1, deadline=script.now)
    script.send(ev.Tick())
    script.kill(0)
    assert [type(command) for command in script.since(script.come_back).commands] == [do.AbortDevice]
    script.join("c")
    assert script.ranks == [1, 3]


def test_a_drain_whose_deadline_comes_before_the_next_commit_falls_back_to_an_abort() -> None:
    script = running("a", "b")
    script.drain(1, deadline=script.now + 5)
    told = script.since(lambda: script.pass_time(6))
    assert [command.workers for command in told.of(do.AbortWorld)] == [(0, 1)]


def test_a_drained_host_gets_no_new_worker() -> None:
    script = running("a", "b")
    script.drain(1)
    script.obey_interrupt()
    script.end_those_told()
    assert script.since(lambda: script.pass_time(30)).of(do.StartWorker) == []


def test_a_booting_worker_of_a_drained_host_leaves_at_once() -> None:
    script = running("a")
    host = script.register("b")
    assert script.drain(host).commands == [do.KillWorker(host, 1)]


# ---------------------------------------------------------------- exceptions


def test_an_exception_on_one_rank_is_a_loss_of_that_rank() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.raises(1)
    reform(script)
    assert script.ranks == [0, 2]


def test_an_exception_on_all_ranks_fails_the_job_with_all_tracebacks() -> None:
    script = running("a", "b")
    script.send(ev.WorkerRaised(0, "ValueError: bad row", "train.py:7", "Traceback A"))
    script.send(ev.WorkerRaised(1, "ValueError: bad row", "train.py:7", "Traceback B"))
    for worker in (0, 1):
        script.exits(worker, 1)
    assert isinstance(script.error, TrainingFailedError)
    assert [failure.last_lines for failure in script.error.failures] == [("last words",)] * 2
    assert not isinstance(script.error, StateLostError)
    assert "Traceback A" in str(script.error)
    assert "Traceback B" in str(script.error)
    assert [failure.rank for failure in script.error.failures] == [0, 1]


def test_the_same_exception_three_times_without_a_commit_fails_the_job() -> None:
    script = running("a", "b", "c", "d")
    script.commit()
    for _ in range(3):
        assert script.outcome is None
        script.raises(script.ranks[-1], error=f"ValueError: row {script.generation}")
        script.come_back()
        if script.outcome is None:
            script.acknowledge()
    assert isinstance(script.error, TrainingFailedError)
    assert "3 times without a commit" in str(script.error)


def test_the_seal_of_a_generation_is_no_progress() -> None:
    """A row that nobody can read would reset the job for ever: each new generation is sealed before it comes to the row."""
    script = running("a", "b", "c", "d")
    script.commit()
    for _ in range(3):
        assert script.outcome is None
        script.raises(script.ranks[-1])
        script.come_back()
        if script.outcome is None:
            script.acknowledge()
            for worker in script.living:
                script.processes[worker].commit = CommitId(script.generation, 0)
                script.heartbeat(worker)
    assert isinstance(script.error, TrainingFailedError)


def test_a_commit_of_others_in_the_step_in_which_a_rank_fails_is_no_progress() -> None:
    """The job made one step in each of endless worlds, whatever reset_limit: all others were past the step's reduction."""
    script = running("a", "b", min_np=2, max_np=2)
    script.commit()
    for _ in range(3):
        assert script.outcome is None
        good, bad = script.ranks
        script.commit(good)
        script.raises(bad)
        script.come_back()
        script.pass_time(5)
        if script.outcome is None:
            script.boot(script.worker_on(1))
            script.acknowledge()
    assert "3 times without a commit" in str(script.error)


def test_the_same_exception_with_commits_between_goes_on() -> None:
    script = running("a", "b", "c", "d", "e", max_np=5)
    for _ in range(4):
        script.commit()
        script.raises(script.ranks[-1])
        reform(script)
    assert script.outcome is None


def test_different_exceptions_are_not_the_same() -> None:
    script = running("a", "b", "c", "d")
    for line in range(3):
        script.raises(script.ranks[-1], where=f"train.py:{line}")
        script.come_back()
        script.acknowledge()
    assert script.outcome is None


def test_an_exception_above_the_elastic_function_three_times_fails_the_job() -> None:
    script = Script(min_np=1, start_timeout=1000)
    script.register("a")
    for _ in range(3):
        script.send(ev.WorkerConnected(script.worker_on(0)))
        script.raises(script.worker_on(0), error="ImportError: no module")
        script.pass_time(5)
    assert isinstance(script.error, TrainingFailedError)
    assert "ImportError" in str(script.error)


def test_a_job_whose_workers_all_raise_of_their_data_fails_with_that() -> None:
    script = running("a", "b")
    for worker in (0, 1):
        error = ("spark_elastic.errors.DataError: part-0 has changed", "train.py:7", "Traceback")
        script.send(ev.WorkerRaised(worker, *error, kind="DataError"))
    for worker in (0, 1):
        script.exits(worker, 1)
    assert isinstance(script.error, TrainingFailedError)
    assert isinstance(script.error, DataError)
    assert "all 2 workers of the world raised" in str(script.error)


def test_a_job_whose_workers_raise_of_different_things_is_of_no_special_kind() -> None:
    script = running("a", "b")
    for worker, kind in ((0, "DataError"), (1, "")):
        script.send(ev.WorkerRaised(worker, f"error {kind}", "train.py:7", "Traceback", kind=kind))
    for worker in (0, 1):
        script.exits(worker, 1)
    assert type(script.error) is TrainingFailedError


def test_a_fatal_exception_fails_the_job_once_the_last_lines_of_its_worker_are_there() -> None:
    script = running("a", "b")
    script.send(ev.WorkerRaised(1, "the result cannot be pickled", "", "Traceback", fatal=True))
    assert script.error is None
    assert script.told[-1] == do.KillWorker(script.host_of(1), 1), "nothing else has ended it yet"
    script.exits(1, -9)
    assert isinstance(script.error, TrainingFailedError)
    assert "cannot be pickled" in str(script.error)
    assert [failure.last_lines for failure in script.error.failures] == [("last words",)]


def test_a_fatal_exception_fails_the_job_also_if_its_worker_does_not_end() -> None:
    script = running("a", "b")
    script.send(ev.WorkerRaised(1, "the result cannot be pickled", "", "Traceback", fatal=True))
    script.pass_time(EXIT_SECONDS + 1)
    assert "cannot be pickled" in str(script.error)


def lose_one_after_the_other(script: Script, times: int, code: int) -> None:
    """Have one worker after the other end so, each 20 seconds after the last, in a job that has not ended before."""
    script.register("a")
    for _ in range(times):
        assert script.outcome is None
        script.send(ev.WorkerConnected(script.newest))
        script.kill(script.newest, code=code)
        script.pass_time(20)


def test_workers_that_keep_crashing_fail_the_job() -> None:
    script = Script(min_np=1, start_timeout=10_000)
    lose_one_after_the_other(script, 10, code=-11)
    assert "crashed 10 times" in str(script.error)


def test_workers_that_are_killed_from_outside_never_count_as_crashes() -> None:
    script = Script(min_np=1, start_timeout=10_000)
    lose_one_after_the_other(script, 30, code=-9)
    assert script.outcome is None


def test_a_function_whose_workers_are_killed_again_and_again_before_it_trains_ends_after_its_start_timeout() -> None:
    script = Script(min_np=1, start_timeout=300)
    lose_one_after_the_other(script, 16, code=-9)
    assert isinstance(script.error, TrainingFailedError)
    assert "lost 16 times in a row before one reached an elastic function" in str(script.error)
    assert "start_timeout" in str(script.error)


def test_a_function_that_is_lost_before_it_trains_runs_again_as_often_as_reset_limit_says() -> None:
    script = Script(min_np=1, reset_limit=2)
    lose_one_after_the_other(script, 3, code=-9)
    assert isinstance(script.error, ResetLimitExceededError)
    assert "reset_limit=2" in str(script.error)
    assert "SIGKILL" in str(script.error)


def test_losses_before_the_function_is_called_do_not_count_against_reset_limit() -> None:
    script = Script(min_np=1, reset_limit=0)
    script.register("a")
    for _ in range(3):
        script.kill(script.newest, code=-9)
        script.pass_time(20)
    assert script.outcome is None


def test_an_incident_that_ends_many_workers_of_a_plain_function_is_one_loss() -> None:
    script = plain("a", "b", "c", reset_limit=1)
    script.pass_time(5)
    script.lose_host(0)
    script.lose_host(1)
    assert script.outcome is None


def test_an_exit_with_code_zero_before_the_result_is_a_failure() -> None:
    script = running("a", "b")
    script.kill(1, code=0)
    assert "exited with code 0 before its result" in str(script.job.book.story()[0])
    assert script.job.setbacks.resets == 1


def test_more_failures_than_reset_limit_end_the_job() -> None:
    script = running("a", "b", "c", reset_limit=1)
    script.commit()
    script.kill(2)
    reform(script)
    assert script.outcome is None
    script.kill(1)
    assert isinstance(script.error, ResetLimitExceededError)
    assert "reset_limit=1" in str(script.error)


def test_planned_changes_do_not_count_against_reset_limit() -> None:
    script = running("a", "b", reset_limit=0)
    script.join("c")
    script.obey_interrupt()
    script.acknowledge()
    script.drain(2)
    script.obey_interrupt()
    script.acknowledge()
    assert script.outcome is None


# ---------------------------------------------------------------- fences


def test_a_late_joiner_never_forms_a_second_world() -> None:
    script = running("a", "b", min_np=1)
    for name in "cd":
        script.join(name, wait=False)
    assert len(script.worlds) == 1
    script.pass_time(5)
    assert len(script.worlds) == 1


def test_a_ready_of_a_past_generation_is_refused() -> None:
    script = running("a", "b")
    script.kill(1)
    reform(script)
    told = script.send(ev.WorkerReady(0, 1, None, "an old message"))
    assert told.commands == []


def test_what_a_fenced_worker_still_says_is_ignored() -> None:
    script = running("a", "b", "c")
    script.send(ev.WorkerGone(2, FirstSign.CONNECTION_BROKE))
    for event in (
        ev.WorkerReady(2, 1, None, "late"),
        ev.WorkerAborted(2, 1, None),
        ev.WorkerReturned(2, 1, None),
        ev.ResultArrived(2, True),
        ev.WorkerRaised(2, "ValueError", "", ""),
        ev.GroupFormed(2, 1),
    ):
        assert script.send(event).commands == []
    script.come_back()
    assert script.ranks == [0, 1]


@pytest.mark.parametrize("ending", ["finish", "fail"])
def test_a_closed_job_admits_nobody(ending: str) -> None:
    script = running("a")
    if ending == "finish":
        script.vote()
        script.deliver()
    else:
        script.raises(0)
    assert script.outcome is not None
    script.hosts[7] = "late"
    assert script.send(ev.TaskRegistered(7, 1, "late", Place("late", 7))).commands == [do.ReleaseTask(7)]


def test_a_host_whose_heartbeat_is_lost_is_replaced_and_is_not_taken_back_when_found_again() -> None:
    script = running("a", "b", heartbeat_timeout=20)
    silent = script.hosts.pop(1)
    told = script.since(lambda: script.pass_time(25))
    assert [command.host for command in told.of(do.RestartTask)] == [1]
    script.come_back(0)
    assert script.ranks == [0]
    assert script.send(ev.TaskHeard(1)).commands == []
    script.hosts[2] = silent
    script._next_host = 3
    script.send(ev.TaskRegistered(2, 1, silent, Place("b", 2)))
    script.boot(script.worker_on(2))
    script.acknowledge()
    script.pass_time(1)
    script.obey_interrupt()
    assert len(script.ranks) == 2


def test_a_heartbeat_that_is_late_but_in_time_changes_nothing() -> None:
    script = running("a", "b", heartbeat_timeout=20)
    assert script.since(lambda: script.pass_time(19, silent={1})).commands == []
    assert script.since(lambda: script.pass_time(19)).commands == []
    assert script.since(lambda: script.pass_time(19, silent={1})).commands == []


def test_a_silent_worker_is_killed_and_replaced() -> None:
    script = running("a", "b", heartbeat_timeout=20)
    told = script.since(lambda: script.pass_time(22, silent={1}))
    assert told.of(do.KillWorker) == [do.KillWorker(1, 1)]
    script.come_back()
    assert script.ranks == [0]


def test_a_paused_driver_takes_nobody_for_silent() -> None:
    script = running("a", "b", heartbeat_timeout=20, hang_timeout=30)
    script.now += 3600
    told = script.since(lambda: (script.send(ev.Tick()), script.pass_time(10)))
    assert told.commands == []
    assert len(script.recorded(DriverPaused)) == 1


def test_a_pause_does_not_hide_a_silence_that_goes_on() -> None:
    script = running("a", "b", heartbeat_timeout=20)
    script.now += 3600
    told = script.since(lambda: script.pass_time(22, silent={1}))
    assert told.of(do.KillWorker) == [do.KillWorker(1, 1)]


def test_a_worker_that_hangs_outside_a_collective_that_all_others_wait_in_is_replaced() -> None:
    script = running("a", "b", "c", hang_timeout=50)
    script.commit()
    for worker in (0, 1):
        script.processes[worker].collectives += 1
    told = script.since(lambda: script.pass_time(60))
    assert told.of(do.KillWorker) == [do.KillWorker(2, 2)]
    script.come_back()
    assert script.ranks == [0, 1]


def test_long_user_code_that_calls_heartbeat_is_no_hang() -> None:
    script = running("a", "b", hang_timeout=50)
    script.commit()
    script.processes[0].collectives += 1
    assert script.since(lambda: script.pass_time(600, busy=True)).commands == []


def test_a_first_step_may_take_twice_as_long() -> None:
    script = running("a", "b", hang_timeout=50)
    script.processes[0].collectives += 1
    assert script.since(lambda: script.pass_time(99)).commands == []
    assert script.since(lambda: script.pass_time(3)).of(do.KillWorker) == [do.KillWorker(1, 1)]


def test_a_function_that_never_commits_fails_with_a_hint() -> None:
    script = running("a", "b", hang_timeout=50)
    script.pass_time(102)
    assert isinstance(script.error, TrainingFailedError)
    assert "state.commit()" in str(script.error)


def test_a_survivor_that_does_not_come_back_is_fenced_after_hang_timeout() -> None:
    script = running("a", "b", "c", hang_timeout=40, ready_timeout=30)
    script.commit()
    script.kill(2)
    script.come_back(0)
    assert script.since(lambda: script.pass_time(39)).of(do.KillWorker) == []
    told = script.since(lambda: script.pass_time(3))
    assert told.of(do.KillWorker) == [do.KillWorker(1, 1)]
    assert script.ranks == [0]


def test_a_survivor_that_calls_heartbeat_is_waited_for() -> None:
    script = running("a", "b", "c", hang_timeout=30, ready_timeout=30)
    script.commit()
    script.kill(2)
    script.come_back(0)
    script.pass_time(100, busy=True)
    assert script.generation == 1
    script.come_back(1)
    assert script.ranks == [0, 1]


def test_ranks_that_do_not_connect_within_form_timeout_start_another_generation() -> None:
    script = Script(min_np=2, num_proc=3, form_timeout=10)
    for name in "abc":
        script.register(name)
    script.boot(0, 1, 2)
    script.acknowledge(0, 1)
    told = script.since(lambda: script.pass_time(12))
    assert [command.workers for command in told.of(do.AbortWorld)] == [(0, 1, 2)]
    script.come_back()
    assert (script.generation, script.ranks) == (2, [0, 1, 2])


def test_a_rank_that_cannot_connect_three_times_is_replaced() -> None:
    script = Script(min_np=2, num_proc=3, form_timeout=10)
    for name in "abc":
        script.register(name)
    script.boot(0, 1, 2)
    for _ in range(2):
        script.acknowledge(0, 1)
        script.pass_time(12)
        script.come_back()
    script.acknowledge(0, 1)
    told = script.since(lambda: script.pass_time(12))
    assert told.of(do.KillWorker) == [do.KillWorker(2, 2)]


# ---------------------------------------------------------------- the end


def test_a_loss_after_some_have_voted_enters_the_function_again_on_all() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.vote(0, 1)
    told = script.since(lambda: script.kill(2))
    assert [command.workers for command in told.of(do.AbortWorld)] == [(0, 1)]
    script.come_back()
    assert script.ranks == [0, 1]
    script.acknowledge()
    script.vote()
    script.deliver()
    assert script.outcome == do.FinishJob((0, 1))


def test_a_vote_that_crosses_the_abort_counts_for_nothing() -> None:
    script = running("a", "b", "c")
    script.kill(2)
    script.vote(0, 1)
    assert not [command for command in script.told if isinstance(command, do.FinishWorld)]
    script.come_back()
    assert script.ranks == [0, 1]


def test_a_vote_before_all_have_acknowledged_is_kept() -> None:
    script = Script(min_np=2)
    script.register("a")
    script.register("b")
    script.boot(0, 1)
    script.acknowledge(0)
    script.vote(0)
    script.acknowledge(1)
    assert script.since(lambda: script.vote(1)).of(do.FinishWorld) == [do.FinishWorld(1, (0, 1))]


def test_a_loss_after_the_finish_fails_the_job_and_names_the_rank() -> None:
    script = running("a", "b")
    script.vote()
    script.deliver(0)
    script.kill(1)
    assert isinstance(script.error, TrainingFailedError)
    assert "rank 1" in str(script.error)


def test_a_worker_that_leaves_after_its_result_is_no_loss() -> None:
    script = running("a", "b")
    script.vote()
    script.deliver(0)
    script.lose_host(0)
    assert script.outcome is None
    script.deliver(1)
    assert script.finished


def test_newcomers_are_sent_away_when_training_has_finished() -> None:
    script = running("a", "b")
    script.join("c", wait=False)
    told = script.since(script.vote)
    assert told.commands == [do.FinishWorld(1, (0, 1)), do.LeaveJob(2)]
    assert script.since(lambda: script.pass_time(1)).of(do.StartWorker) == []


def test_votes_during_an_interrupt_finish_the_job() -> None:
    script = running("a", "b")
    script.join("c")
    script.vote(0, 1)
    script.deliver(0, 1)
    assert script.finished


# ---------------------------------------------------------------- functions without an elastic part


def plain(*names: str, **settings: object) -> Script:
    script = Script(**{"min_np": len(names), "max_np": 4, **settings})
    for name in names:
        script.register(name)
    for worker in list(script.processes):
        script.send(ev.WorkerConnected(worker))
        script.processes[worker].phase = "booting"
    return script


def test_a_plain_function_runs_in_num_proc_workers_and_no_more() -> None:
    script = plain("a", "b", "c", min_np=1, num_proc=2)
    assert sorted(script.processes) == [0, 1]
    script.deliver(1, elastic=False)
    script.deliver(0, elastic=False)
    assert script.outcome == do.FinishJob((0, 1))


def test_a_plain_function_runs_again_where_a_worker_was_lost() -> None:
    script = plain("a", "b")
    script.kill(1)
    script.deliver(0, elastic=False)
    assert script.outcome is None
    script.send(ev.WorkerConnected(2))
    script.deliver(2, elastic=False)
    assert script.outcome == do.FinishJob((0, 2))


def test_the_result_of_a_plain_function_outlives_its_host() -> None:
    script = plain("a", "b")
    script.deliver(0, elastic=False)
    script.lose_host(0)
    script.deliver(1, elastic=False)
    assert script.outcome == do.FinishJob((0, 1))


def test_a_plain_function_may_run_longer_than_start_timeout() -> None:
    script = plain("a", "b", start_timeout=50)
    script.pass_time(500)
    script.deliver(0, 1, elastic=False)
    assert script.finished


def test_a_plain_function_that_raises_everywhere_fails_the_job() -> None:
    script = plain("a")
    for _ in range(3):
        worker = script.worker_on(0)
        script.send(ev.WorkerConnected(worker))
        script.raises(worker)
        script.pass_time(5)
    assert isinstance(script.error, TrainingFailedError)
    assert "bad row" in str(script.error)


def test_a_worker_that_skips_its_elastic_function_fails_the_job_with_a_hint() -> None:
    script = running("a", "b")
    script.join("c", wait=False)
    host = script.register("d")
    worker = script.worker_on(host)
    script.send(ev.WorkerConnected(worker))
    script.send(ev.ResultArrived(worker, False))
    assert "every worker has to" in str(script.error)
