"""The records of the event log: what can happen in a job, with one class for each kind of event.

The driver makes records of these classes, and workers make those of ``reports``. ``event_format`` turns them into dicts, which
are the lines of a log and the arguments of ``on_event``, and back. The name of a kind comes from its class: ``world_formed`` is
a ``WorldFormed``. docs/events.md is made from the classes and their docstrings, which describe fields as ``name: what it is``.

Within a version of the schema, kinds and fields may be added; none is changed or removed. An added field has a default, with
which older logs are read.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from spark_elastic.errors import name_worker
from spark_elastic.protocol.reports import Report, kind_of


class _OfDriver(msgspec.Struct, frozen=True, tag_field="event", tag=kind_of):
    """Base of the driver's records."""


# ---------------------------------------------------------------- the job


class JobStarted(_OfDriver, frozen=True):
    """A run begins. A file to which several runs are appended has one of these for each.

    run_id: also in the names of the run's Spark jobs
    attempt: number of this run among those that have used its checkpoint directory; null without one
    application: Spark's name for the application
    """

    run_id: str
    min_np: int
    num_proc: int
    max_np: int
    attempt: int | None
    application: str


class JobFinished(_OfDriver, frozen=True):
    """All results have arrived. No event of the run follows but ``events_dropped``.

    workers: in rank order
    resets: how many resets failures have caused
    """

    workers: list[int]
    resets: int


class JobFailed(_OfDriver, frozen=True):
    """The run raises an error. No event of the run follows but ``events_dropped``.

    error: the exception's class
    """

    error: str
    message: str


# ---------------------------------------------------------------- hosts


class HostRegistered(_OfDriver, frozen=True):
    """A Spark task offers its slot.

    host: number of the task
    name: the machine's name
    """

    host: int
    slot: int
    name: str


class HostFacts(_OfDriver, frozen=True):
    """What the task of a host has found out about its machine."""

    host: int
    slot: int
    facts: dict[str, object]


class HostLost(_OfDriver, frozen=True):
    """The task of a host has ended, or cannot be reached."""

    host: int
    name: str
    reason: str


class HostDraining(_OfDriver, frozen=True):
    """A host will soon go away, or the discovery script no longer lists it."""

    host: int
    name: str


class HostCooling(_OfDriver, frozen=True):
    """Workers of a host's executor keep dying without a commit, so the executor gets no other worker for a while.

    seconds: for how long; each further death doubles this
    """

    host: int
    name: str
    seconds: float


class HostListedAgain(_OfDriver, frozen=True):
    """The discovery script again lists a host that it had left out."""

    host: int
    name: str


class SlotGivenUp(_OfDriver, frozen=True):
    """Spark has given up the task of a slot before the task had registered; it is submitted again."""

    slot: int
    reason: str


class SlotsYielded(_OfDriver, frozen=True):
    """The job has too few hosts to begin, and gives its slots back for a while.

    hosts: how many the job had
    """

    hosts: int


# ---------------------------------------------------------------- workers


class WorkerStarting(_OfDriver, frozen=True):
    """A host is asked to start a worker."""

    worker: int
    host: int
    name: str


class WorkerStarted(_OfDriver, frozen=True):
    """The process of a worker has started."""

    worker: int
    host: int
    pid: int


class WorkerReady(_OfDriver, frozen=True):
    """A worker has reached its elastic function, and waits for a world.

    generation: the last world of which the worker was a member, 0 for none
    commit: the newest commit that the worker holds, as generation.index; null if it holds none
    """

    worker: int
    generation: int
    commit: str | None


class WorkerLost(_OfDriver, frozen=True):
    """A worker is out of the job.

    host: the machine's name
    """

    worker: int
    rank: int | None
    host: str
    cause: str


class WorkerSampled(_OfDriver, frozen=True):
    """What a worker's process has used so far, and printed since the last such event; at most every five seconds.

    cpu_seconds: on all cores, without child processes
    memory: resident bytes
    last_lines: at most ten, each cut off after 200 characters; null if it has printed nothing since
    """

    worker: int
    cpu_seconds: float
    memory: int
    last_lines: list[str] | None = None


class WorkerRaised(_OfDriver, frozen=True):
    """The user's function has raised in a worker, which is lost because of that.

    error: the exception's class and message
    traceback: as Python prints it
    """

    worker: int
    rank: int | None
    error: str
    traceback: str


class WorkerExited(_OfDriver, frozen=True):
    """The process of a worker has ended.

    code: the exit code; minus the signal, if a signal killed the process
    explains: whether the code explains the loss: until then, only the end of the worker was known
    last_lines: of its output; null if it has printed nothing
    """

    worker: int
    code: int
    meaning: str
    explains: bool | None = None  # None in logs that are older than this field
    last_lines: list[str] | None = None


class WorkerSlow(_OfDriver, frozen=True):
    """A worker computes at less than half the speed of the others, and no rows have moved away from it. Recorded once.

    host: the machine's name
    times: how many times as long it needs for a row as the median of the other ranks
    """

    worker: int
    rank: int
    host: str
    times: float

    def describe(self) -> str:
        """Say which worker is slow, and what helps."""
        return (
            f"{name_worker(self.worker, self.rank)} on {self.host} is slow: a row takes it {self.times:.1f} times as long as "
            'the median of the other ranks, which wait for it in every step; balance="auto" gives it fewer rows'
        )


class WorkerTooSlow(_OfDriver, frozen=True):
    """A worker computes more slowly than ``replace_slow`` allows. It leaves at the next commit, and its slot goes back to Spark.

    host: the machine's name
    times: how many times as long it needs for a row as the median of the other ranks
    seconds: how long its executor gets no worker, and no other worker is replaced; null if it stays because of min_np
    """

    worker: int
    rank: int
    host: str
    times: float
    seconds: float | None

    def describe(self) -> str:
        """Say which worker is too slow, and what follows."""
        follows = (
            "it stays, because fewer than min_np workers would be left without it"
            if self.seconds is None
            else f"it is replaced, and its executor gets no worker for {self.seconds:g} s"
        )
        return (
            f"{name_worker(self.worker, self.rank)} on {self.host} is too slow: a row takes it {self.times:.1f} times as long as "
            f"the median of the other ranks; {follows}"
        )


class ResultArrived(_OfDriver, frozen=True):
    """The result of a worker has arrived."""

    worker: int


# ---------------------------------------------------------------- worlds


class WorldForming(_OfDriver, frozen=True):
    """The members of a new generation connect.

    previous_size: size of the world that made the newest commit, 0 for none
    workers: the members, in rank order
    newest_commit: the commit from which they continue; null if there is none
    """

    generation: int
    size: int
    previous_size: int
    workers: list[int]
    newest_commit: str | None


class WorldFormed(_OfDriver, frozen=True):
    """All members of a generation are connected.

    seconds: since the members were told to connect
    """

    generation: int
    size: int
    seconds: float


class WorldBroken(_OfDriver, frozen=True):
    """A failure ends a generation.

    lost: the worker whose loss is that failure; null for any other failure, missing in logs of older releases
    """

    generation: int
    reason: str
    lost: int | None = None


class WorldInterrupted(_OfDriver, frozen=True):
    """A generation is to end at its next commit, because workers arrive or leave. Until then it trains.

    cause: join, drain, or shrink if fewer workers are to train; empty in logs of older releases
    """

    generation: int
    reason: str
    cause: str = ""


class WorldFinished(_OfDriver, frozen=True):
    """All ranks have left the elastic function."""

    generation: int
    size: int


class WorldSized(_OfDriver, frozen=True):
    """``adaptiveNp`` has decided how many workers train from the next commit on.

    size: of the next worlds, at most
    tried: whether this size is to be measured first; if not, it is final
    sizes: the measured sizes, the largest first
    rows_per_second: the measured speed at each of these sizes
    """

    size: int
    tried: bool
    sizes: list[int]
    rows_per_second: list[float]

    def describe(self) -> str:
        """Say how many workers train, and why."""
        rates = [f"{size} trained {rate:,.0f}" for size, rate in zip(self.sizes, self.rows_per_second, strict=True)]
        measured = " rows/s, ".join(rates) + " rows/s"
        most = self.sizes[0]
        if self.tried:
            return (
                f"{self.size} of {most} workers are tried, because workers spend much of a step on waiting: {measured}"
            )
        if self.size == most:
            return f"all {most} workers train again, because fewer are not faster: {measured}"
        return (
            f"{self.size} of {most} workers train from here on, because more are not faster: {measured}. With "
            f"maxNp={self.size} the next fit leaves the other slots free, with adaptiveNp=False all train"
        )


class StateLost(_OfDriver, frozen=True):
    """No worker holds the state any more; the job continues from its durable checkpoint."""

    generation: int
    reason: str


class NewcomersPaused(_OfDriver, frozen=True):
    """Newcomers have made worlds fail; training continues without them, and they are let in again after a pause.

    host: the machine whose newcomers wait, null for all
    failures: worlds in a row that newcomers have made fail
    seconds: how long the newcomers wait
    """

    host: str | None
    failures: int
    seconds: float
    reason: str


class RunAgain(_OfDriver, frozen=True):
    """A fixed world has broken; its workers are ended, and the whole function runs again in new workers."""

    generation: int


# ---------------------------------------------------------------- the driver itself


class DriverPaused(_OfDriver, frozen=True):
    """The driver itself was paused."""

    seconds: float


class EventsDropped(_OfDriver, frozen=True):
    """Events are missing here, because ``on_event`` or the disk took them more slowly than they arrived.

    count: how many
    """

    count: int


class FaultInjected(_OfDriver, frozen=True):
    """A test's fault strikes.

    fault: its number
    """

    worker: int
    rank: int | None
    fault: int


# ---------------------------------------------------------------- what workers report


class WorkerReported(msgspec.Struct, frozen=True):
    """A worker's report, with what the driver knows about the worker. The kind of the event is that of the report.

    worker: the worker's number in this run
    rank: null before its first world
    generation: 0 before its first world
    """

    worker: int
    rank: int | None
    generation: int
    report: Report


# ---------------------------------------------------------------- records and events

DriverRecord = (
    JobStarted
    | JobFinished
    | JobFailed
    | HostRegistered
    | HostFacts
    | HostLost
    | HostDraining
    | HostCooling
    | HostListedAgain
    | SlotGivenUp
    | SlotsYielded
    | WorkerStarting
    | WorkerStarted
    | WorkerReady
    | WorkerSampled
    | WorkerRaised
    | WorkerLost
    | WorkerExited
    | WorkerSlow
    | WorkerTooSlow
    | ResultArrived
    | WorldForming
    | WorldFormed
    | WorldBroken
    | WorldInterrupted
    | WorldFinished
    | WorldSized
    | StateLost
    | NewcomersPaused
    | RunAgain
    | DriverPaused
    | EventsDropped
    | FaultInjected
)


class Unknown(msgspec.Struct, frozen=True):
    """An event of a kind that was added in a later release."""

    kind: str
    fields: dict[str, object]


Record = DriverRecord | WorkerReported | Unknown

# The classes by the kinds of their events.
DRIVER_RECORDS: dict[str, type[DriverRecord]] = {kind_of(each.__name__): each for each in get_args(DriverRecord)}


class Entry(msgspec.Struct, frozen=True):
    """A record, when it was made, in seconds since 1970 of the driver's clock, and the id of its run, if that is known."""

    time: float
    record: Record
    run: str | None = None
