"""The phases of a world and of a worker, and every transition between them.

Worlds and workers change their phase in ``Generation.enter`` and ``Worker.enter``, which look up the new phase here and raise
``IllegalTransition`` if the tables have no entry. docs/phases.svg shows the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, unique


class IllegalTransition(AssertionError):
    """The tables have no such change for the present phase of ``who``. This is a bug in this package, never in user code."""

    def __init__(self, who: str, phase: Enum, change: Enum) -> None:
        super().__init__(f"{who} is {phase.name}, where {change.name} ({change.value}) cannot happen")


class _Worded(Enum):
    """An enum whose values are descriptions for people."""

    # The driver looks up members for each of many workers. This hash is in C, and several times as fast as that of Enum.
    __hash__ = object.__hash__


@unique
class WorldPhase(_Worded):
    """The phases of the newest world."""

    FORMING = "the ranks connect to each other"
    RUNNING = "all ranks are in the elastic function"
    INTERRUPTING = "the ranks are to leave the function at the same commit"
    BREAKING = "the ranks abort their collectives and come back to the elastic loop"
    FINISHING = "all ranks have left the function; the driver waits for their results"
    OVER = "the world has ended: another one follows, or the job has finished"


@unique
class WorldChange(_Worded):
    """What ends a phase of a world."""

    CONNECTED = "all ranks have connected"
    BROKE = "a rank is lost or stuck, or cannot reach another"
    INTERRUPTED = "newcomers are ready, a host drains, or fewer workers are to train"
    VOTED = "all ranks have returned from the function"
    FOLLOWED = "all living ranks are ready, and the next world forms"
    LOST = "all its ranks are lost, or nobody holds the state any more"
    REPEATED = "the function runs again from its beginning, in a fixed world"
    DELIVERED = "all results have arrived"


@unique
class WorkerPhase(_Worded):
    """The phases of a worker."""

    STARTING = "its process is being started"
    BOOTING = "it imports, and runs the user's code up to the elastic function"
    READY = "it waits at the elastic function for a world"
    MEMBER = "it is in a world"
    VOTED = "it has returned from the function and waits for the other ranks"
    LEAVING = "it has been told to end"
    DONE = "its result is there"


@unique
class WorkerChange(_Worded):
    """What ends a phase of a worker."""

    CONNECTED = "it connects to the driver"
    STOOD_READY = "it says that it is ready"
    CHOSEN = "a world forms with it"
    RETURNED = "it returns from the function"
    CALLED_BACK = "other ranks were interrupted: it has to enter the function again"
    DELIVERED = "its result arrives"
    DISMISSED = "it is told to end"


# A world begins in FORMING. When a job fails, its world stays in its phase.
WORLD: Mapping[tuple[WorldPhase, WorldChange], WorldPhase] = {
    (WorldPhase.FORMING, WorldChange.CONNECTED): WorldPhase.RUNNING,
    (WorldPhase.FORMING, WorldChange.BROKE): WorldPhase.BREAKING,
    (WorldPhase.RUNNING, WorldChange.INTERRUPTED): WorldPhase.INTERRUPTING,
    (WorldPhase.RUNNING, WorldChange.BROKE): WorldPhase.BREAKING,
    (WorldPhase.RUNNING, WorldChange.VOTED): WorldPhase.FINISHING,
    (WorldPhase.INTERRUPTING, WorldChange.FOLLOWED): WorldPhase.OVER,
    (WorldPhase.INTERRUPTING, WorldChange.LOST): WorldPhase.OVER,
    (WorldPhase.INTERRUPTING, WorldChange.BROKE): WorldPhase.BREAKING,
    (WorldPhase.INTERRUPTING, WorldChange.VOTED): WorldPhase.FINISHING,
    (WorldPhase.BREAKING, WorldChange.FOLLOWED): WorldPhase.OVER,
    (WorldPhase.BREAKING, WorldChange.LOST): WorldPhase.OVER,
    (WorldPhase.BREAKING, WorldChange.REPEATED): WorldPhase.OVER,
    # An elastic job fails when a rank is lost after the vote; in a fixed world the whole function runs again.
    (WorldPhase.FINISHING, WorldChange.BROKE): WorldPhase.BREAKING,
    (WorldPhase.FINISHING, WorldChange.DELIVERED): WorldPhase.OVER,
}

# A worker begins in STARTING. A worker that is lost is forgotten, whatever its phase.
WORKER: Mapping[tuple[WorkerPhase, WorkerChange], WorkerPhase] = {
    (WorkerPhase.STARTING, WorkerChange.CONNECTED): WorkerPhase.BOOTING,
    (WorkerPhase.STARTING, WorkerChange.DISMISSED): WorkerPhase.LEAVING,
    (WorkerPhase.BOOTING, WorkerChange.STOOD_READY): WorkerPhase.READY,
    # The user's function has no elastic function, or has not reached it yet on any worker.
    (WorkerPhase.BOOTING, WorkerChange.DELIVERED): WorkerPhase.DONE,
    (WorkerPhase.BOOTING, WorkerChange.DISMISSED): WorkerPhase.LEAVING,
    (WorkerPhase.READY, WorkerChange.STOOD_READY): WorkerPhase.READY,
    (WorkerPhase.READY, WorkerChange.CHOSEN): WorkerPhase.MEMBER,
    # All ranks had returned; the worker had come back nevertheless, and has returned again.
    (WorkerPhase.READY, WorkerChange.DELIVERED): WorkerPhase.DONE,
    (WorkerPhase.READY, WorkerChange.DISMISSED): WorkerPhase.LEAVING,
    (WorkerPhase.MEMBER, WorkerChange.STOOD_READY): WorkerPhase.READY,
    (WorkerPhase.MEMBER, WorkerChange.RETURNED): WorkerPhase.VOTED,
    (WorkerPhase.MEMBER, WorkerChange.DISMISSED): WorkerPhase.LEAVING,
    (WorkerPhase.VOTED, WorkerChange.STOOD_READY): WorkerPhase.READY,
    (WorkerPhase.VOTED, WorkerChange.CALLED_BACK): WorkerPhase.MEMBER,
    (WorkerPhase.VOTED, WorkerChange.DELIVERED): WorkerPhase.DONE,
    (WorkerPhase.VOTED, WorkerChange.DISMISSED): WorkerPhase.LEAVING,
    # The worker's host drains twice, or its result was under way when it was told to end.
    (WorkerPhase.LEAVING, WorkerChange.DISMISSED): WorkerPhase.LEAVING,
    (WorkerPhase.LEAVING, WorkerChange.DELIVERED): WorkerPhase.DONE,
    # The worker had returned before another worker showed that there is an elastic function.
    (WorkerPhase.DONE, WorkerChange.DISMISSED): WorkerPhase.LEAVING,
}
