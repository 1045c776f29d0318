"""What the events of hosts mean: whom they concern, and whom they do not."""

from __future__ import annotations

from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev


def test_the_loss_of_a_host_that_is_gone_already_is_no_news() -> None:
    script = running("a", "b")
    script.lose_host(1)
    assert script.machine.handle(ev.TaskLost(1, "again"), script.now) == []


def test_a_host_that_is_lost_takes_its_worker_along() -> None:
    script = running("a", "b")
    told = script.since(lambda: script.lose_host(1))
    assert told.of(do.AbortWorld) == [do.AbortWorld(1, (0,), script.job.world.broken_by)]
    assert list(script.job.workers) == [0]


def test_why_the_last_slot_was_given_up_is_told_where_there_are_too_few() -> None:
    script = Script(min_np=2, start_timeout=50, yield_after=1000)
    script.register("a")
    script.send(ev.SlotGivenUp(1, "its Python has no torch"))
    script.pass_time(60)
    assert "The last slot that was given up: its Python has no torch" in str(script.error)


def test_spark_takes_a_host_away_whose_worker_leaves_at_the_next_commit() -> None:
    script = running("a", "b")
    assert script.drain(1).of(do.InterruptWorld) == [do.InterruptWorld(1, (0, 1))]
    assert script.machine.handle(ev.HostDraining(1), script.now) == [], "it was said before"
