"""How hosts and workers come together, as the event log tells it."""

from __future__ import annotations

from spark_elastic.protocol.gathering import Gathering
from spark_elastic.protocol.records import (
    HostLost,
    HostRegistered,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
    WorkerStarting,
)


def test_a_worker_is_in_one_stage_at_a_time_and_those_that_are_lost_in_none() -> None:
    there = Gathering()
    for host in range(2):
        there.see(HostRegistered(host, host, f"node{host}"))
        there.see(WorkerStarting(host, host, f"node{host}"))
    there.see(WorkerStarted(0, 0, 17))
    assert (there.hosts, there.starting, there.running, there.ready) == ({0, 1}, {1}, {0}, set())
    there.see(WorkerReady(0, 0, None))
    assert (there.starting, there.running, there.ready) == ({1}, set(), {0})
    there.see(WorkerLost(0, None, "node0", "killed"))
    there.see(HostLost(0, "node0", "gone"))
    assert (there.hosts, there.starting, there.running, there.ready) == ({1}, {1}, set(), set())


def test_it_says_what_a_world_waits_for() -> None:
    there = Gathering()
    assert there.awaited(3) == "3 wait for slots"
    there.see(HostRegistered(0, 0, "node0"))
    there.see(HostRegistered(1, 1, "node1"))
    there.see(WorkerStarting(0, 0, "node0"))
    there.see(WorkerStarted(1, 1, 17))
    assert there.awaited(3) == "1 waits for a slot, 1 imports torch, 1 runs the function's first lines"
    assert Gathering().awaited(0) == ""
