"""What can happen to a job, as told to the ``DriverMachine``. Past tense, plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_elastic.messages import CommitId


@dataclass(frozen=True, slots=True)
class TaskRegistered:
    """A Spark task offers itself as a host. ``place`` tells machine and executor, for the record of failures."""

    host: int
    slot: int
    name: str
    place: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class TaskHeard:
    host: int


@dataclass(frozen=True, slots=True)
class TaskLost:
    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class SlotGivenUp:
    """Spark starts the task of this slot no more; it will be asked again."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class HostDraining:
    """The host will go away, at ``deadline`` at the latest (None: unknown)."""

    host: int
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class HostsListed:
    """The machines that may be used, with the number of workers that each may run, None for any."""

    slots: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker will not act any more, as its connection or the kernel tells; its exit code may follow."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process has ended. ``code`` is minus the signal that killed it."""

    host: int
    worker: int
    code: int
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker stands at the elastic function. ``reason`` is empty after a planned interrupt, and for a newcomer."""

    worker: int
    generation: int
    commit: CommitId | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerAborted:
    worker: int
    generation: int
    commit: CommitId | None


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """One rank has built its process group."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    worker: int
    generation: int
    commit: CommitId | None


@dataclass(frozen=True, slots=True)
class WorkerRaised:
    """The user's function raised. ``fatal``: trying again cannot help (a result that cannot be pickled)."""

    worker: int
    error: str
    place: str
    traceback: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class ResultArrived:
    worker: int
    elastic: bool


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    worker: int
    generation: int
    collectives: int
    beats: int
    commit: CommitId | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    TaskRegistered
    | TaskHeard
    | TaskLost
    | SlotGivenUp
    | HostDraining
    | HostsListed
    | WorkerConnected
    | WorkerGone
    | WorkerExited
    | WorkerReady
    | WorkerAborted
    | GroupFormed
    | WorkerReturned
    | WorkerRaised
    | ResultArrived
    | WorkerHeard
    | Tick
)
