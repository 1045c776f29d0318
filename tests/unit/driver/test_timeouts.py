"""What the machine does about what it finds to be late."""

from __future__ import annotations

from machine_script import running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev


def test_a_drain_deadline_holds_also_after_the_driver_was_paused() -> None:
    script = running("a", "b")
    script.now += 60
    script.send(ev.Tick())
    script.drain(1, deadline=script.now + 5)
    told = script.since(lambda: script.pass_time(7))
    assert len(told.of(do.AbortWorld)) == 1


def test_the_worker_of_a_silent_host_is_fenced() -> None:
    script = running("a", "b", heartbeat_timeout=20)
    script.hosts.pop(1)
    told = script.since(lambda: script.pass_time(22))
    ended = [command.worker for command in told.of(do.KillWorker) + told.of(do.LeaveJob)]
    assert 1 in ended, "its own connection is open: it waits for a world until the job ends"


def test_nothing_but_releases_follows_the_end_of_the_job() -> None:
    script = running("a", "b", "c", reset_limit=0, heartbeat_timeout=20)
    script.pass_time(25, silent={1, 2})
    assert script.error is not None
