"""Turns messages of tasks and workers into events of the machine, where nothing else follows from a message."""

from __future__ import annotations

from spark_elastic.driver import events as ev
from spark_elastic.driver.failures import FirstSign
from spark_elastic.protocol import messages as m


def event_of_task(host: int, message: object) -> ev.Event | None:
    """Return the event for a message of this host's task; None if the message is not an event."""
    match message:
        case m.Pong():
            return ev.TaskHeard(host)
        case m.TaskDraining():
            return ev.HostDraining(host)
        case m.WorkerSeen(worker):
            return ev.WorkerSeen(worker)
        case m.WorkerDying(worker):
            return ev.WorkerGone(worker, FirstSign.PROCESS_DIED)
        case m.WorkerExited(worker, code, last_lines):
            return ev.WorkerExited(host, worker, code, last_lines)
    return None


def event_of_worker(worker: int, message: object) -> ev.Event | None:
    """Return the event for a message of this worker; None if the message is not an event."""
    match message:
        case m.Heartbeat():
            return ev.WorkerHeard(worker, message.generation, message.activity, message.beats, message.commit)
        case m.WorkerReady():
            return ev.WorkerReady(worker, message.generation, message.commit, message.reason, message.slices)
        case m.WorkerAborted():
            return ev.WorkerAborted(worker, message.generation, message.commit)
        case m.WorldBroken():
            return ev.WorldBroken(worker, message.generation, message.reason)
        case m.WorldFormed():
            return ev.GroupFormed(worker, message.generation)
        case m.WorkerReturned():
            return ev.WorkerReturned(worker, message.generation, message.commit)
        case m.StepsTimed(generation, shares, microseconds, period, rows, fixed):
            return ev.StepsTimed(worker, generation, shares, microseconds, period, rows, fixed)
        case m.WorkerRaised():
            return ev.WorkerRaised(worker, message.error, message.where, message.traceback, message.fatal, message.kind)
    return None
