"""When there are too few to train, and when there only seem to be."""

from __future__ import annotations

from machine_script import Script, running


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


def test_hosts_that_drain_are_no_hosts_to_begin_with() -> None:
    script = Script(min_np=2, start_timeout=40, yield_after=1000)
    for name in "ab":
        script.drain(script.register(name))
    script.end_those_told()
    script.pass_time(100)
    assert script.error is not None, "nobody can train, and nobody is told"
