"""Newcomers that fail are let in again more and more rarely, and who has not connected is replaced one after the other."""

from __future__ import annotations

from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.admission import FREE_FAILURES, LONGEST_PAUSE, SHORTEST_PAUSE, Admission
from spark_elastic.driver.forming import FORM_ATTEMPTS, choose_replaced
from spark_elastic.driver.hosts import Place
from spark_elastic.driver.setbacks import NEWCOMERS_LIMIT
from spark_elastic.driver.workers import Worker
from spark_elastic.errors import ResetLimitExceededError, TrainingFailedError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.records import NewcomersPaused


def newcomer(number: int, place: str) -> Worker:
    return Worker(number, number, place, Place(place, 0), started_at=0.0, heard=0.0)


def member(number: int, *, connected: bool = True, failures: int = 0, commit: CommitId | None = None) -> Worker:
    return Worker(
        number, number, "a", Place("a", 0), started_at=0.0, heard=0.0,
        has_connected=connected, form_failures=failures, commit=commit,
    )  # fmt: skip


# ---------------------------------------------------------------- when newcomers are let in


def test_a_few_worlds_in_a_row_may_be_broken_by_newcomers_for_nothing() -> None:
    admission = Admission()
    assert [admission.failed(0.0, 0.1) for _ in range(FREE_FAILURES - 1)] == [0.0] * (FREE_FAILURES - 1)
    assert admission.opens_at(Place("a", 0)) == 0.0


def test_the_pause_of_all_newcomers_doubles_with_each_further_failure() -> None:
    admission = Admission()
    pauses = [admission.failed(100.0, 0.1) for _ in range(FREE_FAILURES + 2)][FREE_FAILURES - 1 :]
    assert pauses == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE]
    assert admission.opens_at(Place("a", 0)) == 100.0 + 4 * SHORTEST_PAUSE
    for _ in range(50):
        assert admission.failed(100.0, 0.1) <= LONGEST_PAUSE


def test_a_newcomer_that_commits_opens_the_door_for_all() -> None:
    admission = Admission()
    for _ in range(FREE_FAILURES):
        admission.failed(100.0, 0.1)
    admission.progressed(Place("b", 0))
    assert admission.opens_at(Place("a", 0)) == 0.0
    assert admission.failed(100.0, 0.1) == 0.0


def test_a_place_that_nobody_could_connect_to_waits_at_once_and_others_do_not() -> None:
    admission = Admission()
    assert admission.unconnected(Place("bad", 0), 100.0, cost=60.0) == 60.0
    assert admission.unconnected(Place("bad", 0), 200.0, cost=60.0) == 120.0
    assert (admission.opens_at(Place("bad", 0)), admission.opens_at(Place("good", 0))) == (320.0, 0.0)


def test_of_places_under_suspicion_one_newcomer_is_let_in_at_a_time_the_least_suspicious_first() -> None:
    admission = Admission()
    for place in ("a", "b", "b"):
        admission.unconnected(Place(place, 0), 0.0, cost=1.0)
    newcomers = [newcomer(7, "b"), newcomer(8, "a"), newcomer(9, "c"), newcomer(10, "d")]
    assert [worker.worker for worker in admission.admit(newcomers, 0.0)] == [9, 10]
    assert [worker.worker for worker in admission.admit(newcomers, 1000.0)] == [8, 9, 10]
    admission.progressed(Place("a", 0))
    assert [worker.worker for worker in admission.admit(newcomers, 1000.0)] == [7, 8, 9, 10]


# ---------------------------------------------------------------- who is replaced when a world does not form


def test_newcomers_are_replaced_at_once_where_the_others_have_stood_still_for_long() -> None:
    members = [member(0, failures=9), member(1, connected=False, failures=1), member(2, connected=False, failures=1)]
    assert choose_replaced(members, members, took_long=True) == members[1:]
    assert choose_replaced(members, members, took_long=False) == []


def test_nobody_who_has_been_in_a_world_is_replaced_while_a_newcomer_is_missing() -> None:
    members = [member(0, failures=9), member(1, connected=False, failures=FORM_ATTEMPTS)]
    assert choose_replaced(members, members, took_long=False) == [members[1]]


def test_among_equals_one_is_replaced_at_a_time_who_has_failed_most_often_then_the_youngest() -> None:
    members = [member(n, connected=False, failures=FORM_ATTEMPTS) for n in range(3)]
    assert choose_replaced(members, members, took_long=True) == [members[2]]
    members[0].form_failures += 1
    assert choose_replaced(members, members, took_long=True) == [members[0]]


def test_the_last_holder_of_the_newest_commit_is_never_replaced_for_not_connecting() -> None:
    holder = member(0, failures=99, commit=CommitId(1, 2))
    behind = member(1, failures=FORM_ATTEMPTS, commit=CommitId(1, 1))
    assert choose_replaced([holder, behind], [holder], took_long=True) == []
    assert choose_replaced([holder, behind], [holder, behind], took_long=True) == [behind]
    second = member(2, failures=FORM_ATTEMPTS, commit=CommitId(1, 2))
    assert choose_replaced([holder, second], [holder, second], took_long=True) == [holder]


# ---------------------------------------------------------------- the machine


def let_in(script: Script, worker: int) -> None:
    """All members leave at their next commit for this newcomer."""
    script.boot(worker)
    script.pass_time(1.0)
    script.obey_interrupt()
    assert worker in script.ranks


def starting(script: Script) -> list[int]:
    return [process.worker for process in script.processes.values() if process.phase == "starting"]


def test_a_newcomer_that_cannot_be_connected_to_costs_one_attempt_and_not_the_job() -> None:
    script = running("a", max_np=2, form_timeout=60)
    script.commit()
    script.register("b", place=Place("b", 1))
    let_in(script, 1)
    told = script.since(lambda: script.pass_time(62))
    assert told.of(do.KillWorker) == [do.KillWorker(1, 1)]
    script.come_back(0)
    script.acknowledge()
    assert script.ranks == [0]
    script.end_those_told()
    # The next one of that place is not let in at once.
    script.boot(*starting(script))
    script.commit()
    assert script.since(lambda: script.pass_time(50)).of(do.InterruptWorld) == []
    assert len(script.since(lambda: script.pass_time(15)).of(do.InterruptWorld)) == 1
    assert [paused.host for paused in script.recorded(NewcomersPaused)] == ["b"]


def test_a_newcomer_of_another_place_is_let_in_meanwhile() -> None:
    script = running("a", max_np=3, form_timeout=60)
    script.commit()
    script.register("b", place=Place("b", 1))
    let_in(script, 1)
    script.pass_time(62)
    script.come_back(0)
    script.acknowledge()
    script.commit()
    good = script.register("c", place=Place("c", 1))
    let_in(script, script.worker_on(good) or 0)


def test_refused_connections_are_tried_again_before_a_newcomer_is_blamed() -> None:
    script = running("a", max_np=2, form_timeout=60)
    script.commit()
    script.register("b", place=Place("b", 1))
    let_in(script, 1)
    for attempt in range(FORM_ATTEMPTS):
        assert script.ranks == [0, 1], attempt
        script.ready(0, "connection refused")
        script.come_back()
    assert script.ranks == [0]
    assert script.error is None


def test_a_loss_that_is_heard_of_later_is_what_the_world_did_not_form_for() -> None:
    script = running("a", "b", max_np=3)
    script.commit()
    script.register("c")
    let_in(script, 2)
    for _ in range(FORM_ATTEMPTS - 1):
        script.ready(0, "connection closed by peer")
        if 1 in script.processes:
            script.kill(1)
        script.come_back()
    script.ready(0, "connection closed by peer")
    script.come_back()
    assert script.ranks == [0, 2]


def fail_to_join(script: Script) -> None:
    """The newcomer that stands ready is let in, and raises before it has the state."""
    worker = next(process.worker for process in script.processes.values() if process.phase == "starting")
    let_in(script, worker)
    for number in script.ranks:
        script.send(ev.GroupFormed(number, script.generation))
    script.raises(worker, error="RuntimeError: shape mismatch", where="train.py:9")
    script.come_back()
    script.acknowledge()
    script.commit()


def test_newcomers_that_fail_every_time_break_a_few_worlds_and_then_have_to_wait() -> None:
    script = running("a", "b", max_np=3)
    script.commit()
    script.register("c")
    for _ in range(FREE_FAILURES):
        fail_to_join(script)
        script.pass_time(20)
    resets = script.job.setbacks.resets
    assert resets == FREE_FAILURES
    (paused,) = script.recorded(NewcomersPaused)
    assert (paused.host, paused.failures, paused.seconds) == (None, FREE_FAILURES, SHORTEST_PAUSE)
    assert "raised RuntimeError: shape mismatch" in paused.reason
    fail_to_join(script)
    script.pass_time(10)
    script.boot(*starting(script))
    assert script.since(lambda: script.pass_time(2 * SHORTEST_PAUSE - 12)).of(do.InterruptWorld) == []
    assert len(script.since(lambda: script.pass_time(4)).of(do.InterruptWorld)) == 1
    assert script.error is None


def test_newcomers_that_fail_wait_also_where_all_who_had_trained_are_lost_and_one_is_left_that_got_the_state() -> None:
    script = running("a", max_np=3, reset_limit=1)
    script.commit()
    script.register("b")
    let_in(script, 1)
    script.acknowledge()  # the newcomer has the state, and has made no commit of its own yet
    for name in "cde":
        script.register(name)
    script.kill(0)
    for _ in range(FREE_FAILURES):
        worker = starting(script)[0]
        script.boot(worker)
        script.come_back()
        assert script.ranks == [1, worker]
        for number in script.ranks:
            script.send(ev.GroupFormed(number, script.generation))
        script.raises(worker, error="RuntimeError: shape mismatch", where="train.py:9")
    script.come_back()
    (paused,) = script.recorded(NewcomersPaused)
    assert paused.failures == FREE_FAILURES
    assert script.error is None
    assert script.ranks == [1]


def test_newcomers_that_fail_do_not_count_against_reset_limit_while_the_others_commit() -> None:
    script = running("a", "b", max_np=3, reset_limit=0)
    script.commit()
    script.register("c")
    for _ in range(FREE_FAILURES + 2):
        fail_to_join(script)
        script.pass_time(100)
    assert script.error is None
    script.kill(1)
    assert isinstance(script.error, ResetLimitExceededError)


def test_a_rank_that_feels_the_end_of_a_newcomer_first_ends_nothing_and_the_loss_of_another_member_counts() -> None:
    for lost, ends in ((2, False), (1, True)):
        script = running("a", "b", max_np=3, reset_limit=0)
        script.commit()
        script.register("c")
        let_in(script, 2)
        for number in script.ranks:
            script.send(ev.GroupFormed(number, script.generation))
        script.ready(0, "connection closed by peer")
        assert script.error is None
        script.kill(lost)
        assert isinstance(script.error, ResetLimitExceededError) == ends


def test_a_newcomer_whose_commit_only_the_others_have_told_of_counts() -> None:
    for told_by in (ev.WorkerAborted, ev.WorkerReady):
        for index, ends in ((1, False), (2, True)):
            script = running("a", "b", max_np=3, reset_limit=0)
            script.commit()
            script.register("c")
            let_in(script, 2)
            for number in script.ranks:
                script.send(ev.GroupFormed(number, script.generation))
            script.kill(2)
            assert script.error is None
            reason = () if told_by is ev.WorkerAborted else ("connection closed by peer",)
            script.send(told_by(0, script.generation, CommitId(script.generation, index), *reason))
            assert isinstance(script.error, ResetLimitExceededError) == ends


def test_newcomers_that_fail_where_the_job_cannot_go_on_without_them_count() -> None:
    script = running("a", "b", min_np=2, max_np=2, reset_limit=2)
    script.commit()
    script.kill(1)
    script.come_back()
    for attempt in range(NEWCOMERS_LIMIT + 2):
        assert script.error is None, attempt
        script.pass_time(20)
        script.boot(*starting(script))
        script.kill(script.ranks[-1])
        script.come_back()
    assert isinstance(script.error, ResetLimitExceededError)


def test_a_rank_of_the_first_world_whose_commits_have_not_been_heard_of_is_no_newcomer() -> None:
    script = running("a", "b", reset_limit=0)
    script.commit(0)
    script.kill(1)
    assert isinstance(script.error, ResetLimitExceededError)


def test_a_crowd_of_newcomers_that_all_raise_does_not_condemn_a_job_that_trains() -> None:
    script = running("a", max_np=5)
    script.commit()
    for name in "bcde":
        script.register(name)
    script.boot(1, 2, 3, 4)
    script.pass_time(1.0)
    script.obey_interrupt()
    assert script.ranks == [0, 1, 2, 3, 4]
    script.raises(1, 2, 3, 4)
    script.come_back()
    assert script.ranks == [0]
    assert script.error is None


def test_newcomers_that_raise_in_worlds_that_never_commit_do_not_condemn_the_job() -> None:
    script = running("a", max_np=4)
    script.commit()
    for name in "bcd":
        script.register(name)
    script.boot(1, 2, 3)
    script.pass_time(1.0)
    script.obey_interrupt()
    for newcomer in (1, 2, 3):  # one after the other, with no commit between
        assert newcomer in script.ranks
        for number in script.ranks:
            script.send(ev.GroupFormed(number, script.generation))
        script.raises(newcomer)
        script.come_back()
    assert script.error is None
    assert script.ranks == [0]


def test_a_job_that_cannot_go_on_without_its_newcomers_ends_when_they_all_raise_the_same() -> None:
    script = running("a", "b", min_np=2, max_np=2)
    script.commit()
    script.kill(1)
    script.come_back()
    for _ in range(4):
        if script.error is None:
            script.pass_time(20)
            script.boot(*starting(script))
            script.raises(script.ranks[-1])
            script.come_back()
    assert isinstance(script.error, TrainingFailedError)
    assert "the same exception" in str(script.error)


def test_newcomers_that_have_to_wait_are_taken_when_there_are_too_few_without_them() -> None:
    script = running("a", "b", min_np=2, max_np=3)
    script.commit()
    script.register("c")
    for _ in range(FREE_FAILURES):
        fail_to_join(script)
        script.pass_time(8)
    waiting = starting(script)
    script.boot(*waiting)
    script.kill(1)
    script.come_back()
    assert script.ranks == [0, *waiting]


def test_a_newcomer_that_came_with_the_last_one_to_fail_waits_with_all_others() -> None:
    """Found by the simulation: it had been in a world, though without a commit, and was let in again at once."""
    script = running("a", max_np=3)
    script.commit()
    script.register("b")
    for _ in range(FREE_FAILURES - 1):
        fail_to_join(script)
        script.pass_time(20)
    script.register("c")
    both = starting(script)
    script.boot(*both)
    script.pass_time(1.0)
    script.obey_interrupt()
    assert set(both) < set(script.ranks)
    for number in script.ranks:
        script.send(ev.GroupFormed(number, script.generation))
    script.raises(both[0])
    script.come_back()
    assert script.ranks == [0]
    script.acknowledge()
    script.commit()
    assert script.since(lambda: script.pass_time(SHORTEST_PAUSE - 2)).of(do.InterruptWorld) == []
    assert len(script.since(lambda: script.pass_time(14)).of(do.InterruptWorld)) == 1
