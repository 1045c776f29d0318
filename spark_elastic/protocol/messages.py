"""The messages between driver, tasks and workers: plain data with a schema.

Requests have names in the imperative, facts in the past tense. A message about a world carries the number of its generation, so
that receivers can refuse stale messages. User code, arguments and results travel as opaque cloudpickle bytes in ``Chunk``.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

import msgspec

from spark_elastic.protocol.reports import Report

# Takes the place of a generation for the namespace of the control store that outlives all generations.
WHOLE_JOB = 0

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class CommitId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names a commit. Commits are ordered by generation first: after a loss, the index alone does not tell which is newer.

    Index 0 is the implicit commit that seals a generation; explicit commits count from 1.
    """

    generation: int
    index: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.index}"


class Slices(msgspec.Struct, frozen=True, array_like=True):
    """Which slices of a commit a worker holds: the numbers ``held``, of ``of`` in all. Slice 0 of 1 is the whole commit.

    ``is_live``: state that is equal on all ranks is still the commit's in the worker's objects, so no slice of it is missing.
    """

    commit: CommitId
    held: tuple[int, ...]
    of: int
    is_live: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the commit."""
        return len(self.held) == self.of


def uses_gpus(torch: str) -> bool:
    """Whether a torch of this version is one for GPUs; False for an empty version."""
    return bool(torch) and not torch.endswith("+cpu")


class HostFacts(msgspec.Struct, frozen=True):
    """What a task knows about the place where it runs. ``torch`` is the version of torch there; empty if not installed."""

    name: str
    address: str
    pid: int
    executor_pid: int
    python: str
    torch: str
    gpus: tuple[str, ...] = ()
    cpus: int = 1
    attempt: int = 0
    warnings: tuple[str, ...] = ()


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a world. ``commit`` is the newest commit that the worker holds; None for a newcomer.

    ``slices`` says which slices of that commit the worker holds, if commits are kept in slices; None means the whole commit.
    """

    worker: int
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    commit: CommitId | None
    slices: Slices | None = None


class Stream(Enum):
    """The two output streams of a worker."""

    OUT = "stdout"
    ERR = "stderr"


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages that travel in a frame."""


# ---------------------------------------------------------------- both ways


class Ping(Message, frozen=True):
    """Ask whether the other end is there. It answers with a ``Pong`` of the same number."""

    number: int


class Pong(Message, frozen=True):
    """The answer to a ping, with its number."""

    number: int


class Chunk(Message, frozen=True):
    """A piece of a long byte string; ``last`` ends it."""

    data: bytes
    last: bool


# ---------------------------------------------------------------- task → driver


class TaskHello(Message, frozen=True):
    """A task's first message: this host offers the slot."""

    slot: int
    facts: HostFacts


class WorkerStarted(Message, frozen=True):
    """The task has started the training process with this pid."""

    worker: int
    pid: int


class WorkerSeen(Message, frozen=True):
    """Sent every second: the worker's process exists and is not stopped, even if its Python is too busy to say so itself."""

    worker: int


class WorkerSampled(Message, frozen=True):
    """Sent every few seconds: the worker's CPU time and memory, and what it has printed."""

    worker: int
    cpu_seconds: float
    memory: int
    last_lines: tuple[str, ...] = ()


class WorkerDying(Message, frozen=True):
    """The kernel has begun to take the worker down; its sockets may stay open until its memory is freed."""

    worker: int


class WorkerExited(Message, frozen=True):
    """The worker process is gone: ``code`` is its exit code, or minus the signal that killed it."""

    worker: int
    code: int
    last_lines: tuple[str, ...] = ()


class OutputLines(Message, frozen=True):
    """Lines that the worker printed; ``dropped`` counts those that were not forwarded."""

    worker: int
    stream: Stream
    lines: tuple[str, ...]
    dropped: int = 0


class TaskDraining(Message, frozen=True):
    """The place where the task runs is about to be taken away; its processes have some time to leave."""


class TaskFailed(Message, frozen=True):
    """The host cannot run workers; the task is about to raise."""

    reason: str


# ---------------------------------------------------------------- driver → task


class Welcome(Message, frozen=True):
    """The task is registered as this host. ``env`` holds environment variables for the worker's process."""

    host: int
    env: dict[str, str]


class StartWorker(Message, frozen=True):
    """Start the process of a worker. With ``token`` the process proves to the driver that it is this worker."""

    worker: int
    token: str


class KillWorker(Message, frozen=True):
    """Kill the worker and every process that it has started."""

    worker: int


class RestartTask(Message, frozen=True):
    """Raise, so that Spark starts the task again, perhaps elsewhere."""

    reason: str


class ReleaseTask(Message, frozen=True):
    """End the worker and the task; nothing has failed."""


# ---------------------------------------------------------------- worker → driver


class WorkerHello(Message, frozen=True):
    """A worker's first message. The driver answers with the user's function, as chunks."""

    worker: int
    pid: int
    token: str


class WorkerReady(Message, frozen=True):
    """The worker has reached the elastic function and waits for the next world.

    ``generation`` is the last generation that the worker was a member of, 0 for a newcomer. ``slices`` are the slices that it
    holds of ``commit`` and of the commit before; None if it holds the whole of ``commit``.
    """

    generation: int
    commit: CommitId | None
    reason: str = ""
    slices: tuple[Slices, ...] | None = None


class WorkerAborted(Message, frozen=True):
    """The control thread's answer to ``AbortWorld``: Gloo's collectives are aborted.

    ``commit`` is the commit that this worker can go back to; None if there is none.
    """

    generation: int
    commit: CommitId | None


class WorldBroken(Message, frozen=True):
    """This rank has lost another, and may be unable to become ready until all ranks abort."""

    generation: int
    reason: str


class WorldFormed(Message, frozen=True):
    """This rank's process group of the generation is complete."""

    generation: int


class WorkerReturned(Message, frozen=True):
    """The worker has returned from the elastic function, which is its vote for the end."""

    generation: int
    commit: CommitId | None


class WorkerRaised(Message, frozen=True):
    """The user's function has raised. ``where``: the innermost frame, as file:line.

    ``kind``: the class of an error of this package; else empty. ``fatal``: it ends the job.
    """

    error: str
    where: str
    traceback: str
    fatal: bool = False
    kind: str = ""


class StepsTimed(Message, frozen=True):
    """How long each rank needs for its part of a step, as exchanged between ranks at a commit. Lists are in rank order.

    ``shares`` are each rank's rows, or shards, of a step. ``microseconds`` exclude the time that a rank waited for others.
    ``period`` is the time from one step to the next in microseconds, waiting included; 0 if not known. ``rows`` are the rows of
    a full step. ``fixed`` are the microseconds of rank 0's that do not depend on its share. Only rank 0 sends this.
    """

    generation: int
    shares: tuple[int, ...]
    microseconds: tuple[int, ...]
    period: int = 0
    rows: int = 0
    fixed: int = 0


class ResultFollows(Message, frozen=True):
    """The result comes next, as chunks."""

    elastic: bool


# The name of the collective that a commit makes outside torch's default group.
COMMIT = "state.commit()"


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """What the group of a generation does on a rank.

    ``collectives`` counts the collectives that were entered; ``waiting`` says that one of them, or a transfer, is not complete.
    ``moved`` counts the bytes that have come over the group's connections, or have arrived at the other end; ``silent`` counts
    the connections whose other end does not answer. ``changes`` counts changes of the trained parameters; ``change`` is the
    last one, which ranks compare in the collective numbered ``compared_in``. ``recent`` holds the names of the last
    collectives, newest last; ``frozen`` names the model that was called last, if nothing in it required a gradient.
    """

    collectives: int = 0
    waiting: bool = False
    moved: int = 0
    silent: int = 0
    changes: int = 0
    compared_in: int = 0
    change: str = ""
    recent: tuple[str, ...] = ()
    frozen: str = ""


class Heartbeat(Message, frozen=True):
    """Sent every second by the control thread. ``beats`` counts the calls of ``state.heartbeat()``."""

    generation: int
    activity: Activity
    beats: int
    commit: CommitId | None


# What the control store can do.
StoreOperation = Literal["set", "get", "gather", "add", "check", "delete", "set_default"]


class StoreRequest(Message, frozen=True):
    """One operation on the control store, within the namespace of a generation (0: the job's)."""

    number: int
    generation: int
    operation: StoreOperation
    keys: tuple[str, ...]
    values: tuple[bytes, ...] = ()
    amount: Int64 = 0


class Reported(Message, frozen=True):
    """Metrics that user code gave to ``state.report()``, or the package's own facts for the event log."""

    generation: int
    report: Report


class ClaimFault(Message, frozen=True):
    """Ask whether this injected fault may strike. Each fault strikes a limited number of times in a job."""

    number: int
    fault: int


# ---------------------------------------------------------------- driver → worker


class FormWorld(Message, frozen=True):
    """Build a generation's process group. ``previous_size``: the size of the newest commit's world; 0 without a commit."""

    generation: int
    members: tuple[Member, ...]
    previous_size: int
    backend: str


class AbortWorld(Message, frozen=True):
    """Abort the collectives of the Gloo group at once, because the generation is over, and report which commit is whole."""

    generation: int
    reason: str


class AbortDevice(Message, frozen=True):
    """Abort the collectives of the device's group, if there is one besides Gloo's. Every rank has answered ``AbortWorld``.

    The answers come first because an abort on one rank can complete the collectives of other ranks with garbage.
    """

    generation: int


class InterruptWorld(Message, frozen=True):
    """Leave the generation at the next commit, all ranks at the same one."""

    generation: int


class FinishWorld(Message, frozen=True):
    """Return from the elastic function, because all ranks have voted. No reset follows."""

    generation: int


class LeaveJob(Message, frozen=True):
    """End, because the worker is no longer needed."""


class StoreReply(Message, frozen=True):
    """The answer to ``StoreRequest`` or ``ClaimFault``. ``gone`` says that the generation is over.

    ``error`` says what was wrong with the request; it is empty if nothing was.
    """

    number: int
    values: tuple[bytes, ...] = ()
    amount: int = 0
    gone: bool = False
    error: str = ""


ToDriver = (
    TaskHello
    | WorkerStarted
    | WorkerSeen
    | WorkerSampled
    | WorkerDying
    | WorkerExited
    | OutputLines
    | TaskDraining
    | TaskFailed
    | WorkerHello
    | WorkerReady
    | WorkerAborted
    | WorldBroken
    | WorldFormed
    | WorkerReturned
    | WorkerRaised
    | StepsTimed
    | ResultFollows
    | Heartbeat
    | StoreRequest
    | Reported
    | ClaimFault
    | Chunk
    | Pong
)
ToTask = Welcome | StartWorker | KillWorker | RestartTask | ReleaseTask | Ping
ToWorker = FormWorld | AbortWorld | AbortDevice | InterruptWorld | FinishWorld | LeaveJob | StoreReply | Chunk
