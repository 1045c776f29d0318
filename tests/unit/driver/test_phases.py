"""The tables of phases: what they forbid raises with the history that led there."""

from __future__ import annotations

import pytest
from machine_script import running

from spark_elastic.driver import events as ev
from spark_elastic.driver import phases
from spark_elastic.driver.history import CHANGES_KEPT, EVENTS_KEPT, MachineFault, RecentHistory
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


def test_a_fault_of_the_machine_is_told_with_what_happened_before() -> None:
    script = running("a", "b")
    script.lose_host(1, reason="somebody pulled the cable")
    script.job.workers[0].phase = WorkerPhase.STARTING  # as a mistake elsewhere would leave it
    with pytest.raises(MachineFault) as raised:
        script.ready(0)
    assert isinstance(raised.value.__cause__, IllegalTransition)
    first, *story = str(raised.value).splitlines()
    assert first.startswith("IllegalTransition: worker 0 is STARTING, where STOOD_READY")
    assert "TaskLost(host=1, reason='somebody pulled the cable')" in story[-3]
    assert story[-2].endswith("generation 1: RUNNING → BREAKING")
    assert "WorkerReady(worker=0" in story[-1]


def test_the_history_keeps_what_is_no_routine_and_changes_apart_from_crowds_of_events() -> None:
    history = RecentHistory()
    history.changed("generation 1: FORMING → RUNNING", 1.0)
    for worker in range(10 * EVENTS_KEPT):
        history.happened(ev.WorkerConnected(worker), 2.0)
        history.happened(ev.WorkerSeen(worker), 2.0)
    history.changed("generation 1: RUNNING → BREAKING", 3.0)
    lines = str(history.fault(KeyError("x"))).splitlines()
    assert lines[0] == "KeyError: 'x'; what happened before:"
    assert lines[1].strip() == "1.000 generation 1: FORMING → RUNNING"
    assert lines[-1].strip() == "3.000 generation 1: RUNNING → BREAKING"
    assert len(lines) == 3 + EVENTS_KEPT
    assert not any("WorkerSeen" in line for line in lines)
    for _ in range(10 * CHANGES_KEPT):
        history.changed("again", 4.0)
    assert str(history.fault(KeyError("x"))).count("again") == CHANGES_KEPT
