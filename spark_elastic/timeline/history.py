"""The history of a run for people: what each worker did and when, the worlds, the speed, and the cost of resets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from spark_elastic.errors import name_worker
from spark_elastic.protocol import records, reports
from spark_elastic.protocol.records import Entry, WorkerReported
from spark_elastic.timeline.resets import Reset, explains, find_resets
from spark_elastic.timeline.start import Wait, find_start

# Speeds are measured between reports at least this far apart; in long runs further, so that at most this many are drawn.
SPEED_SECONDS = 1.0
SPEEDS = 600

# The host of a worker whose start is not in the log, because events were dropped or lines are damaged.
UNKNOWN_HOST = "an unknown host"


class Doing(Enum):
    """What a worker does. The value is the wording for people."""

    BOOTING = "boots"
    PREPARING = "runs the function's first lines"
    WAITING = "waits for a world"
    SYNCING = "connects and syncs"
    TRAINING = "trains"
    LEAVING = "leaves a broken step"
    FINISHING = "has finished"


@dataclass(frozen=True)
class Span:
    """What one worker did from ``start`` to ``end``."""

    doing: Doing
    start: float
    end: float
    generation: int


@dataclass
class WorkerLine:
    """The life of one worker. ``cause`` says why it was lost, and is empty if it was not."""

    worker: int
    host: str
    spans: list[Span] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    cause: str = ""
    samples: list[Sample] = field(default_factory=list)
    # How much of its GPU the worker has used, with the times.
    gpu: list[tuple[float, reports.GpuUsed]] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    traceback: str = ""


@dataclass(frozen=True)
class Sample:
    """What a worker's process had used at a time: seconds on all cores since its start, and bytes of memory at that time."""

    time: float
    cpu_seconds: float
    memory: int


@dataclass(frozen=True)
class SlowWorker:
    """A worker that has computed more slowly than others. If rows were moved away from it, it is a ``RelievedWorker``.

    times: how many times as long it needed for a row as the fastest rank (as the median of the others, if no rows were moved),
    when this was first found.
    """

    worker: int
    rank: int
    host: str
    at: float
    times: float

    def __str__(self) -> str:
        return (
            f"{name_worker(self.worker, self.rank)} on {self.host} was slow: {self.times:.1f} times as long for a row as the "
            "others, which waited for it in every step"
        )


@dataclass(frozen=True)
class RelievedWorker(SlowWorker):
    """A slow worker whose part of a step became smaller, last at ``at``.

    part, of: how many of a step's rows, or shards, it takes from then on.
    """

    part: int
    of: int
    unit: str

    def __str__(self) -> str:
        return (
            f"{name_worker(self.worker, self.rank)} on {self.host} was slow: {self.times:.1f} times as long for a row as the "
            f"fastest; it came to take {self.part} of {self.of} {self.unit} a step"
        )


@dataclass(frozen=True)
class Generation:
    """One world, from its first step to its end."""

    generation: int
    size: int
    start: float
    end: float


@dataclass(frozen=True)
class Speed:
    """Rows per second (or steps, if rows are not counted) from ``start`` to ``end``."""

    start: float
    end: float
    per_second: float


@dataclass(frozen=True)
class History:
    """The history of one run. All times are in seconds since the run began."""

    run_id: str
    began: float  # in seconds since 1970
    seconds: float
    max_np: int
    outcome: str
    is_over: bool
    has_failed: bool
    failure: str  # the whole message of the error that ended the run, empty if none did
    start: list[Wait]
    workers: list[WorkerLine]
    generations: list[Generation]
    resets: list[Reset]
    speeds: list[Speed]
    unit: str
    work: int
    steps: int
    metrics: dict[str, list[tuple[float, float]]]
    texts: dict[str, str] = field(default_factory=dict)
    slow: list[SlowWorker] = field(default_factory=list)
    # The workers that ``replace_slow`` has found too slow.
    too_slow: list[records.WorkerTooSlow] = field(default_factory=list)
    # The decisions on how many workers train.
    sized: list[records.WorldSized] = field(default_factory=list)

    @property
    def trained_from(self) -> float | None:
        """The time when the first worker began to train; None if none did."""
        starts = [span.start for line in self.workers for span in line.spans if span.doing is Doing.TRAINING]
        return min(starts, default=None)

    @property
    def seconds_lost(self) -> float:
        """How many seconds, from the first step on, were spent without work that counts."""
        return sum(reset.end - reset.begin if reset.lost is None else reset.lost for reset in self.resets)

    @property
    def availability(self) -> float | None:
        """The share of the time, from the first step on, in which the job trained; None if it never did."""
        whole = self._seconds_from_first_step
        return max(0.0, 1 - self.seconds_lost / whole) if whole else None

    @property
    def per_second(self) -> float:
        """Rows or steps per second from the first step to the end, resets included."""
        whole = self._seconds_from_first_step
        return self.work / whole if whole else 0.0

    @property
    def _seconds_from_first_step(self) -> float:
        return 0.0 if self.trained_from is None else self.seconds - self.trained_from


def read_history(entries: Sequence[Entry], until: float = 0.0) -> History:
    """Read the history from the entries of one run, up to its last, or up to ``until`` (since 1970) if that is later.

    Raises ``ValueError`` unless the first is a ``job_started``. If entries are missing, so is what they would have said.
    """
    begun, began = entries[0].record, entries[0].time
    if not isinstance(begun, records.JobStarted):
        raise ValueError(f"a run begins with a job_started, not with {begun}")
    # No time in the run is negative, even if the clock was set back.
    moved = [Entry(max(entry.time - began, 0.0), entry.record) for entry in entries]
    outcome = _outcome(moved)
    if outcome is None and until - began > moved[-1].time:
        moved.append(Entry(until - began, records.Unknown("now", {})))
    seconds = max(entry.time for entry in moved)
    progress, lines = _progress(moved), _worker_lines(moved)
    unit, done = _work(progress)
    return History(
        run_id=begun.run_id,
        began=began,
        seconds=seconds,
        max_np=begun.max_np,
        outcome=outcome or "is not over in this log",
        is_over=outcome is not None,
        has_failed=any(isinstance(entry.record, records.JobFailed) for entry in moved),
        failure=next((entry.record.message for entry in moved if isinstance(entry.record, records.JobFailed)), ""),
        start=find_start(moved),
        workers=lines,
        generations=_generations(moved),
        resets=find_resets(moved),
        speeds=_speeds(done, max(SPEED_SECONDS, seconds / SPEEDS)),
        unit=unit,
        work=max(done[-1][1] - done[0][1], 0) if done else 0,
        steps=_steps(moved, progress),
        metrics=_metrics(moved),
        texts=_texts(moved),
        slow=_slow_workers(moved, lines),
        too_slow=[entry.record for entry in moved if isinstance(entry.record, records.WorkerTooSlow)],
        sized=[entry.record for entry in moved if isinstance(entry.record, records.WorldSized)],
    )


def _outcome(entries: Sequence[Entry]) -> str | None:
    """Say how the run ended; None if it is not over."""
    for entry in reversed(entries):
        match entry.record:
            case records.JobFinished():
                return "finished"
            case records.JobFailed(error, message):
                return f"failed: {error}: {(message.splitlines() or [''])[0]}"  # further lines may be tracebacks
    return None


def _worker_lines(entries: Sequence[Entry]) -> list[WorkerLine]:
    lines = _Lines()
    for entry in entries:
        lines.see_worker(entry)
        lines.see_process(entry)
        lines.see_world(entry)
    lines.end(entries[-1].time)
    return list(lines.lines.values())


class _Lines:
    """Follows what each worker does, entry by entry."""

    def __init__(self) -> None:
        self.lines: dict[int, WorkerLine] = {}
        # For each worker: what it does at present, since when, and in which generation.
        self._now: dict[int, tuple[Doing, float, int]] = {}
        self._members: list[int] = []
        self._generation = 0

    def see_worker(self, entry: Entry) -> None:
        """Process an entry about one worker."""
        match entry.record:
            case records.WorkerStarting(worker, name=name):
                self.lines[worker] = WorkerLine(worker, name)
                self._change(worker, Doing.BOOTING, entry.time)
            case records.WorkerStarted(worker) if worker in self._now:
                self._change(worker, Doing.PREPARING, entry.time)
            case records.WorkerReady(worker):
                self._change(worker, Doing.WAITING, entry.time)
            case WorkerReported(worker, report=reports.Entered()) if worker in self._now:
                self._change(worker, Doing.TRAINING, entry.time)
            case records.WorkerLost(worker, host=host, cause=cause):
                self._change(worker, None, entry.time)
                self._line(worker, host).cause = cause
            case records.WorkerExited(worker, meaning=meaning) as exited:
                self._change(worker, None, entry.time)
                if explains(exited, self._line(worker).cause):
                    self._line(worker).cause = meaning
            case records.ResultArrived(worker) if worker in self._now:
                if not self._generation:  # this job's function has no elastic part
                    self._now[worker] = (Doing.TRAINING, *self._now[worker][1:])
                self._change(worker, None, entry.time)

    def see_process(self, entry: Entry) -> None:
        """Process an entry about what a worker's process uses, prints and raises."""
        match entry.record:
            case records.WorkerSampled(worker, cpu_seconds, memory, lines):
                self._line(worker).samples.append(Sample(entry.time, cpu_seconds, memory))
            case WorkerReported(worker, report=reports.GpuUsed() as used):
                self._line(worker).gpu.append((entry.time, used))
                return
            case records.WorkerExited(worker, last_lines=lines):
                pass
            case records.WorkerRaised(worker, traceback=traceback):
                self._line(worker).traceback = traceback
                return
            case _:
                return
        if lines is not None:
            self._line(worker).last_lines = lines

    def see_world(self, entry: Entry) -> None:
        """Process an entry about all members of a world."""
        match entry.record:
            case records.WorldForming(generation, workers=workers):
                self._generation, self._members = generation, workers
                for rank, worker in enumerate(workers):
                    self._line(worker).ranks[generation] = rank
                    self._change(worker, Doing.SYNCING, entry.time)
            case records.WorldBroken():
                for worker in self._members:
                    if self._now.get(worker, (None,))[0] in (Doing.TRAINING, Doing.SYNCING):
                        self._change(worker, Doing.LEAVING, entry.time)
            case records.WorldFinished():
                for worker in self._members:
                    self._change(worker, Doing.FINISHING, entry.time)

    def end(self, time: float) -> None:
        """End the spans that are still open when the log ends."""
        for worker in list(self._now):
            self._change(worker, None, time)

    def _line(self, worker: int, host: str = UNKNOWN_HOST) -> WorkerLine:
        """Return the line of a worker, even of a worker whose start is not in the log."""
        return self.lines.setdefault(worker, WorkerLine(worker, host))

    def _change(self, worker: int, doing: Doing | None, time: float) -> None:
        if worker in self._now:
            before, since, generation = self._now.pop(worker)
            self.lines[worker].spans.append(Span(before, since, time, generation))
        if doing is not None and worker in self.lines:
            self._now[worker] = (doing, time, self._generation)


def _generations(entries: Sequence[Entry]) -> list[Generation]:
    found = []
    ends = (records.WorldBroken, records.WorldForming, records.WorldFinished, records.JobFailed)
    for place, entry in enumerate(entries):
        if isinstance(entry.record, records.WorldFormed):
            later = (other.time for other in entries[place + 1 :] if isinstance(other.record, ends))
            end = next(later, entries[-1].time)
            found.append(Generation(entry.record.generation, entry.record.size, entry.time, end))
    return found


def _slow_workers(entries: Sequence[Entry], lines: Sequence[WorkerLine]) -> list[SlowWorker]:
    """Return the slow workers, in the order in which they were found."""
    ranks = {(generation, rank): line for line in lines for generation, rank in line.ranks.items()}
    found: dict[int, SlowWorker] = {}
    for entry in entries:
        match entry.record:
            case WorkerReported(generation=generation, report=reports.SharesChanged() as change):
                for rank, times in enumerate(change.slowness):
                    part, line = change.after[rank], ranks.get((generation, rank))
                    if line is not None and times >= reports.SLOW and part < change.before[rank]:
                        # With a small share, time that is not in proportion to rows weighs more.
                        first = found.get(line.worker)
                        times = times if first is None else first.times
                        slow = RelievedWorker(
                            line.worker, rank, line.host, entry.time, times, part, sum(change.after), change.unit
                        )
                        found[line.worker] = slow
            case records.WorkerSlow(worker, rank, host, times):
                found.setdefault(worker, SlowWorker(worker, rank, host, entry.time, times))
    return list(found.values())


def _progress(entries: Sequence[Entry]) -> list[tuple[float, reports.Progress]]:
    """Return the reports of progress with their times."""
    found = []
    for entry in entries:
        match entry.record:
            case WorkerReported(report=reports.Progress() as progress):
                found.append((entry.time, progress))
    return found


def _steps(entries: Sequence[Entry], progress: Sequence[tuple[float, reports.Progress]]) -> int:
    """Return how many steps were made. A run that failed soon may have reported only the first steps of worlds."""
    first = (
        entry.record.report.step
        for entry in entries
        if isinstance(entry.record, records.WorkerReported) and isinstance(entry.record.report, reports.Stepped)
    )
    return max([*first, *(report.step for _, report in progress)], default=0)


def _work(reports: Sequence[tuple[float, reports.Progress]]) -> tuple[str, list[tuple[float, int]]]:
    """Return the unit of work, and the work done by each time: rows of all epochs, or steps if rows are not counted."""
    counted = _rows(reports)
    return ("rows", counted) if counted else ("steps", [(time, report.step) for time, report in reports])


def _rows(reports: Sequence[tuple[float, reports.Progress]]) -> list[tuple[float, int]]:
    """Return the rows of all epochs by each time. A loader that is set back to an epoch adds to those before."""
    counted = []
    before = last_step = last_done = 0
    for time, report in reports:
        done = report.rows_done
        if done is None or report.epoch is None or report.rows_total is None:
            continue
        if done < last_done and report.step > last_step:
            before += last_done - report.epoch * report.rows_total
        counted.append((time, before + done))
        last_step, last_done = report.step, done
    return counted


def _speeds(done: Sequence[tuple[float, int]], seconds: float) -> list[Speed]:
    """Return consecutive speeds, each over at least ``seconds``."""
    marks: list[tuple[float, int]] = []
    for time, work in done:
        if not marks or time - marks[-1][0] >= seconds:
            marks.append((time, work))
    return [Speed(a, b, max(after - before, 0) / (b - a)) for (a, before), (b, after) in pairwise(marks)]


def _metrics(entries: Sequence[Entry]) -> dict[str, list[tuple[float, float]]]:
    """Return the metrics that rank 0 has reported, over time."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        match entry.record:
            case WorkerReported(rank=0, report=reports.Metrics(values)):
                for name, value in values.items():
                    if name != "step" and _is_number(value):
                        found.setdefault(name, []).append((entry.time, float(value)))
    return found


def _texts(entries: Sequence[Entry]) -> dict[str, str]:
    """Return rank 0's last reported values that are not numbers, by name."""
    found: dict[str, str] = {}
    for entry in entries:
        match entry.record:
            case WorkerReported(rank=0, report=reports.Metrics(values)):
                found.update({name: value for name, value in values.items() if isinstance(value, str)})
    return found


def _is_number(value: object) -> bool:
    # The comparison refuses NaN, and integers that no float can hold.
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
