"""Who is in the next world, and who hands the newest commit on."""

from __future__ import annotations

from machine_script import reform, running

from spark_elastic.driver import events as ev
from spark_elastic.protocol.messages import CommitId


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


def test_the_old_size_is_that_of_the_world_that_made_the_newest_commit() -> None:
    script = running("a", "b", "c")
    script.commit()
    script.kill(2)
    script.come_back()
    script.kill(1)
    script.come_back()
    assert [world.previous_size for world in script.worlds] == [0, 3, 3]
