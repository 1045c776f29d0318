"""Analyses the resets of a run: what each has cost the workers that trained on, and where the time went."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from spark_elastic.protocol import records, reports
from spark_elastic.protocol.records import Entry, Record, WorkerReported

# An injected fault counts as the cause of a loss if it struck at most this long before the survivors' last commit.
FAULT_SECONDS = 1.0

# In logs without the field ``explains``, these causes of a loss are provisional, and the exit code explains it.
_FIRST_SIGNS = ("its process died", "its connection to the driver broke")


class Kind(Enum):
    """Why a world ended."""

    LOSS = "loss"
    JOIN = "join"
    DRAIN = "drain"
    SHRINK = "shrink"


class Part(Enum):
    """The parts of a reset's time, in order. The value is the wording for people."""

    DETECT = "notice"
    ABORT = "leave the step"
    REGROUP = "wait for workers"
    CONNECT = "connect"
    SYNC = "sync state"
    STEP = "first step"


@dataclass(frozen=True)
class Reset:
    """One reset, from the last sign of work before it to the first step after it. Times are those of the log.

    ``reason`` tells of the workers that were lost and of what has ended them, if the log has that: survivors first report a
    broken connection. ``begin`` is the time of the fault if one was injected, else of the survivors' last commit, because the
    time of the actual cause is unknown. ``lost`` is the number of seconds in which survivors did no work that counts. It ends
    when they enter the function again, so it excludes the first step; it is None if no worker survived or training did not
    continue.
    """

    kind: Kind
    generation: int
    reason: str
    begin: float
    noticed: float
    end: float
    new_generation: int | None = None
    old_size: int = 0
    new_size: int = 0
    lost: float | None = None
    steps_lost: int = 0
    victim: int | None = None
    parts: dict[Part, float] = field(default_factory=dict)


def find_resets(entries: Sequence[Entry]) -> list[Reset]:
    """Find the resets in the entries of one run. A world that broke before it trained belongs to the preceding reset."""
    log = _Log.of(entries)
    resets: list[Reset] = []
    start: _Ending | None = None
    later: _Ending | None = None  # the beginning of another reset, before this one was over
    known = 0
    for entry in entries:
        record, generation = entry.record, _generation_of(entry.record)
        if start is None or generation <= start.generation:
            known = max(known, log.step_of(record))
        match record:
            case records.WorldBroken() | records.WorldInterrupted():
                ending = _Ending.of(entry.time, record)
                is_same = start is not None and generation == start.generation
                # A reset that began as a planned departure can still become a failure.
                if start is None or (is_same and ending.kind is Kind.LOSS):
                    start = ending
                elif not is_same:
                    later = ending
            case WorkerReported(report=reports.Stepped()) | records.WorldFinished():
                if start and generation > start.generation:
                    # Another rank's first step may be noted before the last rank has said that the world has formed.
                    formed_at = log.formed.get(generation, entry.time)
                    resets.append(_take_apart(log, start, generation, formed_at, known))
                    known = min((sign.step for sign in log.entered[generation]), default=known)
                    start = later if later is not None and later.generation == generation else None
                    later = None
    if start is not None:  # the run ended during this reset
        size = log.size_of(start.generation)
        end = entries[-1].time
        reason = log.reason_of(start, end)
        resets.append(Reset(start.kind, start.generation, reason, start.time, start.time, end, old_size=size))
    return resets


def explains(exited: records.WorkerExited, cause: str) -> bool:
    """Whether an exit code explains a worker's loss better than ``cause``, which was known before."""
    return cause in _FIRST_SIGNS if exited.explains is None else exited.explains


def _generation_of(record: Record) -> int:
    """Return the generation that a record is about, if resets are computed from records of its kind; else 0."""
    match record:
        case (
            WorkerReported(generation=generation)
            | records.WorkerReady(generation=generation)
            | records.WorldBroken(generation=generation)
            | records.WorldInterrupted(generation=generation)
            | records.WorldFinished(generation=generation)
        ):
            return generation
    return 0


def _kind_of(record: records.WorldInterrupted) -> Kind:
    """Return the kind of a planned end. Logs of older releases tell it only in the reason, for people."""
    known = {kind.value: kind for kind in Kind}
    if record.cause in known:
        return known[record.cause]
    is_shrinking = record.reason.endswith("are to train")
    return Kind.DRAIN if "drain" in record.reason else Kind.SHRINK if is_shrinking else Kind.JOIN


@dataclass(frozen=True)
class _Ending:
    """The first sign that a world is ending, with the time at which it was noticed."""

    time: float
    kind: Kind
    generation: int
    reason: str

    @classmethod
    def of(cls, time: float, record: records.WorldBroken | records.WorldInterrupted) -> _Ending:
        kind = Kind.LOSS if isinstance(record, records.WorldBroken) else _kind_of(record)
        return cls(time, kind, record.generation, record.reason)


@dataclass(frozen=True)
class _Forming:
    """The time when the members of a world began to connect, their number, and the workers."""

    time: float
    size: int
    workers: Sequence[int] = ()


@dataclass(frozen=True)
class _Loss:
    """The loss of a worker: its time, who it was, and the reason as far as it was known then."""

    time: float
    worker: int
    who: str
    cause: str


@dataclass(frozen=True)
class _Fault:
    """The time when a fault was injected, and the rank that it struck."""

    time: float
    rank: int | None


@dataclass(frozen=True)
class _Sign:
    """A report of a worker: its time, the commits made before, and for a survivor its seconds without work."""

    time: float
    worker: int
    step: int = 0
    idle: float | None = None


@dataclass(frozen=True)
class _Log:
    """The records from which resets are computed, by generation."""

    forming: dict[int, _Forming]
    # The time when each world had formed.
    formed: dict[int, float]
    entered: dict[int, list[_Sign]]
    stepped: dict[int, list[_Sign]]
    ready: dict[int, list[_Sign]]
    faults: list[_Fault]
    losses: list[_Loss]
    # What the exit codes of lost workers have said, where they explain the loss.
    explained: dict[int, str]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> _Log:
        log = cls({}, {}, defaultdict(list), defaultdict(list), defaultdict(list), [], [], {})
        for entry in entries:
            match entry.record:
                case records.WorldForming(generation, size, workers=workers):
                    log.forming[generation] = _Forming(entry.time, size, workers)
                case records.WorldFormed(generation):
                    log.formed[generation] = entry.time
                case records.FaultInjected(rank=rank):
                    log.faults.append(_Fault(entry.time, rank))
                case records.WorkerLost(worker, int(rank), host, cause):
                    log.losses.append(_Loss(entry.time, worker, f"rank {rank} on {host}", cause))
                case records.WorkerExited(worker, meaning=meaning) as exited:
                    cause = next((loss.cause for loss in log.losses if loss.worker == worker), "")
                    if explains(exited, cause):
                        log.explained[worker] = meaning
                case records.WorkerReady(worker, generation):
                    log.ready[generation].append(_Sign(entry.time, worker))
                case WorkerReported(worker, generation=generation, report=reports.Entered(step, idle)):
                    log.entered[generation].append(_Sign(entry.time, worker, step, idle))
                case WorkerReported(worker, generation=generation, report=reports.Stepped(step)):
                    log.stepped[generation].append(_Sign(entry.time, worker, step))
        return log

    def size_of(self, generation: int) -> int:
        """Return how many members a world had, 0 if the log does not say."""
        return self.forming[generation].size if generation in self.forming else 0

    def reason_of(self, ending: _Ending, until: float) -> str:
        """Return why a world ended, by its members that were lost before ``until``; what was noticed first if none was."""
        members = self.forming[ending.generation].workers if ending.generation in self.forming else ()
        lost = [loss for loss in self.losses if loss.worker in members and loss.time <= until]
        # A worker that is ready has left its world, and does not end it any more.
        back = {sign.worker: sign.time for sign in self.ready[ending.generation]}
        lost = [loss for loss in lost if loss.time <= back.get(loss.worker, loss.time)]
        if ending.kind is not Kind.LOSS or not lost:
            return ending.reason
        causes = [self.explained.get(loss.worker, loss.cause) for loss in lost]
        if len(lost) > 1:
            causes = [cause.partition("\n")[0] for cause in causes]
        return "; ".join(f"{loss.who} was lost: {cause}" for loss, cause in zip(lost, causes, strict=True))

    def step_of(self, record: Record) -> int:
        """Return how many commits had been made, if the record says so; else 0."""
        match record:
            case WorkerReported(report=reports.Progress(step) | reports.Stepped(step)):
                return step
            case records.WorkerReady(commit=str(commit)) if re.fullmatch(r"\d{1,18}\.\d{1,18}", commit):
                generation, index = map(int, commit.split("."))
                return min((sign.step for sign in self.entered[generation]), default=0) + index
        return 0


def _take_apart(log: _Log, start: _Ending, new: int, formed_at: float, known: int) -> Reset:
    """Compute a reset from its first sign and the world that trained on, ``new``; ``known`` commits were made before it."""
    old = start.generation
    entered, stepped = log.entered[new], log.stepped[new]
    forming = log.forming.get(new, _Forming(formed_at, 0))  # the event may be missing in the log
    idle = {sign.worker: sign.idle for sign in entered if sign.idle is not None}

    def latest(signs: Sequence[_Sign], default: float) -> float:
        """Return the time of the last survivor's sign, or of the last newcomer's if no worker survived."""
        return max((sign.time for sign in signs if sign.worker in idle or not idle), default=default)

    worked = max((sign.time - idle[sign.worker] for sign in entered if sign.worker in idle), default=start.time)
    begin, victim = worked, None
    if start.kind is Kind.LOSS:  # after a planned interrupt, workers train on until their next commit
        # A fault strikes at a commit, which other workers may make later.
        # One from before this world has been the cause of an earlier reset.
        earliest = max(worked - FAULT_SECONDS, min((sign.time for sign in log.entered[old]), default=0.0))
        struck = [fault for fault in log.faults if earliest <= fault.time <= start.time]
        begin = min(struck[-1].time if struck else worked, start.time)
        victim = struck[-1].rank if struck else None
    entered_at = latest(entered, formed_at)
    marks = {
        Part.DETECT: start.time,
        Part.ABORT: min(latest(log.ready[old], start.time), forming.time),
        Part.REGROUP: forming.time,
        Part.CONNECT: formed_at,
        Part.SYNC: entered_at,
        Part.STEP: latest(stepped, entered_at),
    }
    parts, last = {}, begin
    for part, mark in marks.items():
        parts[part] = round(max(mark - last, 0.0), 4)
        last = max(mark, last)
    return Reset(
        start.kind,
        start.generation,
        log.reason_of(start, forming.time),
        begin,
        start.time,
        last,
        new_generation=new,
        old_size=log.size_of(old),
        new_size=log.size_of(new),
        lost=max(idle.values(), default=None),
        steps_lost=max(known - min((sign.step for sign in entered), default=known), 0),
        victim=victim,
        parts=parts,
    )
