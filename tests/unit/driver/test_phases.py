"""The tables of phases: what they have, and that what they do not have raises."""

from __future__ import annotations

import pytest
from machine_script import running

from spark_elastic.driver import phases
from spark_elastic.driver.phases import IllegalTransition, WorkerChange, WorkerPhase, WorldChange, WorldPhase


def test_every_phase_is_reached_and_every_change_is_in_the_tables() -> None:
    assert {WorldPhase.FORMING, *phases.WORLD.values()} == set(WorldPhase)
    assert {WorkerPhase.STARTING, *phases.WORKER.values()} == set(WorkerPhase)
    assert {change for _, change in phases.WORLD} == set(WorldChange)
    assert {change for _, change in phases.WORKER} == set(WorkerChange)


def test_a_world_that_is_over_changes_no_more() -> None:
    assert WorldPhase.OVER not in {phase for phase, _ in phases.WORLD}


def test_a_change_that_the_tables_do_not_have_names_who_would_make_it() -> None:
    script = running("a", "b")
    with pytest.raises(IllegalTransition, match=r"worker 1 is MEMBER, where CONNECTED .* cannot happen"):
        script.job.workers[1].enter(WorkerChange.CONNECTED)
    assert script.job.world is not None
    with pytest.raises(IllegalTransition, match=r"generation 1 is RUNNING, where DELIVERED .* cannot happen"):
        script.job.world.enter(WorldChange.DELIVERED)
    assert script.job.world.phase is WorldPhase.RUNNING
