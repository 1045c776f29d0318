"""What is kept of what has happened, for the error of a machine that made a mistake."""

from __future__ import annotations

import pytest
from machine_script import running

from spark_elastic.driver import events as ev
from spark_elastic.driver.history import CHANGES_KEPT, EVENTS_KEPT, MachineFault, RecentHistory
from spark_elastic.driver.phases import IllegalTransition, WorkerPhase


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
