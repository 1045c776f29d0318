"""Hosts and workers that come and go, whatever the worlds do."""

from __future__ import annotations

from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev


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
