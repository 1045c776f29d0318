"""What tasks and workers say becomes an event of theirs, with every fact in its place."""

from __future__ import annotations

import pytest

from spark_elastic.driver import events as ev
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.translation import event_of_task, event_of_worker
from spark_elastic.protocol import messages as m

COMMIT = m.CommitId(2, 3)
ACTIVITY = m.Activity(4, True)
SLICES = (m.Slices(COMMIT, (0, 1), 3),)


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (m.Pong(1), ev.TaskHeard(5)),
        (m.TaskDraining(), ev.HostDraining(5, None)),
        (m.WorkerSeen(7), ev.WorkerSeen(7)),
        (m.WorkerDying(7), ev.WorkerGone(7, FirstSign.PROCESS_DIED)),
        (m.WorkerExited(7, -9, ("last words",)), ev.WorkerExited(5, 7, -9, ("last words",))),
    ],
)
def test_what_a_task_says_is_an_event_of_its_host(message: m.Message, event: ev.Event) -> None:
    assert event_of_task(5, message) == event


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (m.Heartbeat(2, ACTIVITY, 9, COMMIT), ev.WorkerHeard(7, 2, ACTIVITY, 9, COMMIT)),
        (m.WorkerReady(2, COMMIT, "a peer was lost", SLICES), ev.WorkerReady(7, 2, COMMIT, "a peer was lost", SLICES)),
        (m.WorkerAborted(2, COMMIT), ev.WorkerAborted(7, 2, COMMIT)),
        (m.WorldBroken(2, "a connection ended"), ev.WorldBroken(7, 2, "a connection ended")),
        (m.WorldFormed(2), ev.GroupFormed(7, 2)),
        (m.WorkerReturned(2, COMMIT), ev.WorkerReturned(7, 2, COMMIT)),
        (m.StepsTimed(2, (8, 4), (30, 20), 40, 12, 5), ev.StepsTimed(7, 2, (8, 4), (30, 20), 40, 12, 5)),
        (
            m.WorkerRaised("E: x", "a.py:3", "Traceback …", True, "DataError"),
            ev.WorkerRaised(7, "E: x", "a.py:3", "Traceback …", True, "DataError"),
        ),
    ],
)
def test_what_a_worker_says_is_an_event_of_that_worker(message: m.Message, event: ev.Event) -> None:
    assert event_of_worker(7, message) == event


def test_who_may_not_say_something_brings_no_event_about() -> None:
    """Else a task could end a worker's world, or a worker its host."""
    from_tasks = (m.Pong(1), m.TaskDraining(), m.WorkerSeen(7), m.WorkerDying(7), m.WorkerExited(7, -9))
    assert [event_of_worker(7, message) for message in from_tasks] == [None] * 5
    from_workers = (m.WorldFormed(2), m.WorldBroken(2, "x"), m.WorkerReturned(2, COMMIT), m.Ping(1), m.LeaveJob())
    assert [event_of_task(5, message) for message in from_workers] == [None] * 5
