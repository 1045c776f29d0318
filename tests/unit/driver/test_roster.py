"""Hosts and workers that come and go, whatever the worlds do."""

from __future__ import annotations

from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.hosts import FAILURES_OF_A_BAD_HOST, Host, Place
from spark_elastic.driver.phases import WorkerChange
from spark_elastic.driver.roster import Roster
from spark_elastic.protocol.records import SlotsYielded


def list_hosts(script: Script, **slots: int | None) -> None:
    script.send(ev.HostsListed(slots))


def leave(script: Script) -> None:
    """The running world is interrupted, and goes on without those that drain."""
    before = script.generation
    script.obey_interrupt()
    assert script.generation == before + 1
    script.acknowledge()
    script.end_those_told()


def test_three_two_one_by_discovery_and_back() -> None:
    script = running("a", "a", "a")
    list_hosts(script, a=3)
    assert script.told[-1] == do.FormWorld(1, script.worlds[-1].members, 0)
    list_hosts(script, a=2)
    leave(script)
    assert script.ranks == [0, 1]
    list_hosts(script, a=1)
    leave(script)
    assert script.ranks == [0]
    list_hosts(script, a=3)
    newcomers = [worker for worker in script.processes if worker not in script.ranks]
    script.boot(*newcomers)
    script.pass_time(1.0)
    script.obey_interrupt(0)
    assert len(script.ranks) == 3
    assert script.ranks[0] == 0
    assert script.job.setbacks.resets == 0


def test_a_host_that_is_no_longer_listed_leaves_without_a_rollback_and_idles() -> None:
    script = running("a", "b")
    list_hosts(script, a=None, b=None)
    told = script.since(lambda: list_hosts(script, a=None))
    assert told.names() == ["InterruptWorld"]
    leave(script)
    assert script.ranks == [0]
    assert script.since(lambda: script.pass_time(5.0)).commands == []


def test_a_host_that_spark_takes_away_is_released_when_its_worker_has_left() -> None:
    script = running("a", "b")
    script.drain(1)
    told = script.since(lambda: leave(script))
    assert told.of(do.ReleaseTask) == [do.ReleaseTask(1)]
    assert script.since(lambda: script.pass_time(5.0)).of(do.ReleaseTask) == []


def test_a_machine_that_comes_back_unlisted_gets_no_worker() -> None:
    script = running("a", "b")
    list_hosts(script, a=None, b=None)
    list_hosts(script, a=None)
    leave(script)
    script.lose_host(1)
    assert script.worker_on(script.register("b")) is None


def roster(*names: str) -> Roster:
    """Hosts with a worker each, on executors of their own."""
    made = Roster()
    for number, name in enumerate(names):
        made.register(Host(number, number, name, Place(name, number)), members=())
    made.start_workers(0.0, None)
    return made


def test_so_many_workers_are_started_as_may_be_each_on_a_host_of_its_own() -> None:
    made = Roster()
    for number in range(3):
        made.register(Host(number, number, "a", Place("a", number)), members=())
    started = [command for command in made.start_workers(0.0, 2) if isinstance(command, do.StartWorker)]
    assert started == [do.StartWorker(0, 0), do.StartWorker(1, 1)]
    assert made.start_workers(0.0, 2) == []


def test_who_has_not_connected_cannot_be_told_to_leave_and_is_killed() -> None:
    made = roster("a", "b")
    made.workers[0].enter(WorkerChange.CONNECTED)
    assert made.dismiss(made.workers.values()) == [do.LeaveJob(0), do.KillWorker(1, 1)]


def test_an_end_is_expected_after_an_order_or_a_result_and_frees_the_host() -> None:
    made = roster("a", "b")
    made.dismiss([made.workers[0]])
    assert made.exited(0, on=0)
    assert not made.exited(1, on=1), "nobody has told it to end"
    assert list(made.workers) == [1]
    assert [host.worker for host in made.hosts] == [None, None]
    assert not made.exited(9, on=1)


def test_all_hosts_are_given_back_with_their_workers_once_that_is_recorded() -> None:
    made = roster("a", "b")
    assert made.yield_slots() == [do.Record(SlotsYielded(2)), do.YieldSlots(), do.ReleaseTask(0), do.ReleaseTask(1)]
    assert (made.workers, list(made.hosts)) == ({}, [])


def test_a_place_is_at_fault_when_its_workers_fail_again_and_again_and_not_for_the_loss_of_a_member() -> None:
    for is_member in (False, True):
        made = roster("a")
        worker = made.workers[0]
        pauses = []
        for failure in range(1, FAILURES_OF_A_BAD_HOST + 1):
            worker.started_at = now = 100.0 * failure
            pauses.append(made.blame_place(worker, now + 1.0, is_member=is_member))
        assert pauses[0] == 0.0
        assert pauses[1:] == sorted(pauses[1:])
        assert pauses[-1] > 0.0
        (host,) = made.hosts
        assert host.at_fault != is_member
