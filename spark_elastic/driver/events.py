"""Events: what can happen to a job, as reported to the ``DriverMachine``. Names are in the past tense; fields are plain facts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.hosts import Place
from spark_elastic.protocol.messages import Activity, CommitId, Slices


class TaskRegistered(msgspec.Struct, frozen=True):
    """A Spark task has offered itself as a host."""

    host: int
    slot: int
    name: str
    place: Place
    address: str = ""


class TaskHeard(msgspec.Struct, frozen=True):
    """A message from a task has arrived."""

    host: int


class TaskLost(msgspec.Struct, frozen=True):
    """The connection to a task broke, or its slot ended."""

    host: int
    reason: str


class SlotGivenUp(msgspec.Struct, frozen=True):
    """Spark no longer starts the task of this slot, so the task is submitted again."""

    slot: int
    reason: str


class HostDraining(msgspec.Struct, frozen=True):
    """The host will go away, at the latest at ``deadline``; None if the deadline is not known."""

    host: int
    deadline: float | None = None


class HostsListed(msgspec.Struct, frozen=True):
    """The discovery script has listed these machines, with the number of workers that each may run, None for any."""

    slots: Mapping[str, int | None]


class WorkerConnected(msgspec.Struct, frozen=True):
    """A training process has connected to the driver."""

    worker: int


class WorkerGone(msgspec.Struct, frozen=True):
    """The worker is gone, as the end of its connection or the kernel has shown; its exit code may follow."""

    worker: int
    sign: FirstSign


class WorkerSeen(msgspec.Struct, frozen=True):
    """The worker's task has reported that the worker's process exists and is not stopped."""

    worker: int


class FaultStruck(msgspec.Struct, frozen=True):
    """An injected fault, which ``fault`` names, is about to end the worker's process."""

    worker: int
    fault: str


class WorkerExited(msgspec.Struct, frozen=True):
    """The worker's process has ended. ``code`` is minus the signal that killed it."""

    host: int
    worker: int
    code: int
    last_lines: tuple[str, ...] = ()


class WorkerReady(msgspec.Struct, frozen=True):
    """The worker has reached the elastic function. ``reason`` is empty after a planned interrupt, and for a newcomer.

    ``slices`` are the slices of its last commits that it holds; None if it holds the whole of ``commit``.
    """

    worker: int
    generation: int
    commit: CommitId | None
    reason: str = ""
    slices: tuple[Slices, ...] | None = None


class WorkerAborted(msgspec.Struct, frozen=True):
    """A worker has aborted its world. ``commit`` is the last commit that it can go back to; None if there is none."""

    worker: int
    generation: int
    commit: CommitId | None


class WorldBroken(msgspec.Struct, frozen=True):
    """One rank has lost another, and may be unable to become ready until all ranks abort."""

    worker: int
    generation: int
    reason: str


class GroupFormed(msgspec.Struct, frozen=True):
    """One rank has built its process group."""

    worker: int
    generation: int


class WorkerReturned(msgspec.Struct, frozen=True):
    """A worker has returned from the elastic function."""

    worker: int
    generation: int
    commit: CommitId | None


class WorkerRaised(msgspec.Struct, frozen=True):
    """User code has raised, in the line ``where``. ``fatal``: another try cannot help, e.g. the result cannot be pickled."""

    worker: int
    error: str
    where: str
    traceback: str
    fatal: bool = False
    kind: str = ""


class StepsTimed(msgspec.Struct, frozen=True):
    """All ranks have timed their parts of a step: ``shares`` (rows, or shards) took so many ``microseconds``, in rank order.

    ``period``: the microseconds from one step to the next; 0 if not known. ``rows``: the rows of a full step. ``fixed``: rank
    0's microseconds that do not depend on its share.
    """

    worker: int
    generation: int
    shares: tuple[int, ...]
    microseconds: tuple[int, ...]
    period: int = 0
    rows: int = 0
    fixed: int = 0


class ResultFlowed(msgspec.Struct, frozen=True):
    """A piece of the worker's result has arrived."""

    worker: int


class ResultArrived(msgspec.Struct, frozen=True):
    """A worker's return value has arrived. ``elastic``: it was returned after the vote that ends an elastic function."""

    worker: int
    elastic: bool


class WorkerHeard(msgspec.Struct, frozen=True):
    """A worker's heartbeat has arrived."""

    worker: int
    generation: int
    activity: Activity
    beats: int
    commit: CommitId | None


class Tick(msgspec.Struct, frozen=True):
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
    | WorkerSeen
    | FaultStruck
    | WorkerExited
    | WorkerReady
    | WorkerAborted
    | WorldBroken
    | GroupFormed
    | WorkerReturned
    | WorkerRaised
    | StepsTimed
    | ResultFlowed
    | ResultArrived
    | WorkerHeard
    | Tick
)
