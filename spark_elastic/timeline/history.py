"""History: one run as people look at it: who did what when, in which worlds, how fast, and what the resets cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from spark_elastic.timeline.resets import Event, Reset, find_resets

# A speed is that between two reports which are at least this far apart, and further in long runs, so that this many are drawn.
SPEED_SECONDS = 1.0
SPEEDS = 600

# Logs from before the field ``explains`` have one of these as the cause of a loss that only the exit code explains.
_FIRST_SIGNS = ("its process died", "its connection to the driver broke")


class Doing(Enum):
    """What a worker does. The value says it to people."""

    BOOTING = "boots"
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
    """One worker's life. ``cause`` says why it was lost; empty for one that was not."""

    worker: int
    host: str
    spans: list[Span] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    cause: str = ""


@dataclass(frozen=True)
class Generation:
    """One world, from its first step to its end."""

    generation: int
    size: int
    start: float
    end: float


@dataclass(frozen=True)
class Speed:
    """Rows (or steps, where there are no rows to count) a second, from ``start`` to ``end``."""

    start: float
    end: float
    per_second: float


@dataclass(frozen=True)
class History:
    """All times are seconds since the run began."""

    run_id: str
    seconds: float
    max_np: int
    outcome: str
    workers: list[WorkerLine]
    generations: list[Generation]
    resets: list[Reset]
    speeds: list[Speed]
    unit: str
    work: int
    steps: int
    metrics: dict[str, list[tuple[float, float]]]

    @property
    def trained_from(self) -> float:
        """When the first worker began to train; the run's end if none did."""
        starts = [span.start for line in self.workers for span in line.spans if span.doing is Doing.TRAINING]
        return min(starts, default=self.seconds)

    @property
    def seconds_lost(self) -> float:
        """Seconds from the first step on in which nobody did work that counts."""
        return sum(reset.end - reset.begin if reset.lost is None else reset.lost for reset in self.resets)

    @property
    def availability(self) -> float:
        """The share of the time, from the first step on, in which the job trained."""
        whole = self.seconds - self.trained_from
        return max(0.0, 1 - self.seconds_lost / whole) if whole > 0 else 0.0

    @property
    def per_second(self) -> float:
        """Rows or steps a second from the first step to the end, resets included."""
        whole = self.seconds - self.trained_from
        return self.work / whole if whole > 0 else 0.0


def read_history(events: Sequence[Event]) -> History:
    """Make sense of the events of one run, the first of which is ``job_started``."""
    start = events[0]
    began = start["time"]
    moved = [{**event, "time": event["time"] - began} for event in events]
    last = moved[-1]
    unit, done = _work(moved)
    return History(
        run_id=start["run_id"],
        seconds=last["time"],
        max_np=start["max_np"],
        outcome=_outcome(moved),
        workers=_worker_lines(moved),
        generations=_generations(moved),
        resets=find_resets(moved),
        speeds=_speeds(done, max(SPEED_SECONDS, last["time"] / SPEEDS)),
        unit=unit,
        work=max(done[-1][1] - done[0][1], 0) if done else 0,
        steps=max((event["values"]["step"] for event in moved if event["event"] == "progress"), default=0),
        metrics=_metrics(moved),
    )


def _outcome(events: Sequence[Event]) -> str:
    for event in reversed(events):
        if event["event"] == "job_finished":
            return "finished"
        if event["event"] == "job_failed":
            return f"failed: {event['error']}: {(event['message'].splitlines() or [''])[0]}"  # tracebacks may follow
    return "is not over in this log"


def _worker_lines(events: Sequence[Event]) -> list[WorkerLine]:
    lines = _Lines()
    for event in events:
        if "worker" in event:
            lines.see_worker(event)
        else:
            lines.see_world(event)
    lines.end(events[-1]["time"])
    return list(lines.lines.values())


class _Lines:
    """Follows what each worker does, event by event."""

    def __init__(self) -> None:
        self.lines: dict[int, WorkerLine] = {}
        # What each worker does now, since when, and in which generation.
        self._now: dict[int, tuple[Doing, float, int]] = {}
        self._members: list[int] = []
        self._generation = 0

    def see_worker(self, event: Event) -> None:
        """Take in what happened to one worker."""
        worker, time = event["worker"], event["time"]
        match event["event"]:
            case "worker_starting":
                self.lines[worker] = WorkerLine(worker, event["name"])
                self._change(worker, Doing.BOOTING, time)
            case "worker_ready":
                self._change(worker, Doing.WAITING, time)
            case "entered" if worker in self._now:
                self._change(worker, Doing.TRAINING, time)
            case "worker_lost":
                self._change(worker, None, time)
                self.lines[worker].cause = event["cause"]
            case "worker_exited":
                self._change(worker, None, time)
                if event.get("explains", self.lines[worker].cause in _FIRST_SIGNS):
                    self.lines[worker].cause = event["meaning"]
            case "result_arrived":
                if not self._generation:  # a function without an elastic part
                    self._now[worker] = (Doing.TRAINING, *self._now[worker][1:])
                self._change(worker, None, time)

    def see_world(self, event: Event) -> None:
        """Take in what happened to all members of a world."""
        time = event["time"]
        match event["event"]:
            case "world_forming":
                self._generation, self._members = event["generation"], event["workers"]
                for rank, worker in enumerate(self._members):
                    self._change(worker, Doing.SYNCING, time)
                    self.lines[worker].ranks[self._generation] = rank
            case "world_broken":
                for worker in self._members:
                    if self._now.get(worker, (None,))[0] in (Doing.TRAINING, Doing.SYNCING):
                        self._change(worker, Doing.LEAVING, time)
            case "world_finished":
                for worker in self._members:
                    self._change(worker, Doing.FINISHING, time)

    def end(self, time: float) -> None:
        """End what workers still do when the log ends."""
        for worker in list(self._now):
            self._change(worker, None, time)

    def _change(self, worker: int, doing: Doing | None, time: float) -> None:
        if worker in self._now:
            before, since, generation = self._now.pop(worker)
            self.lines[worker].spans.append(Span(before, since, time, generation))
        if doing is not None and worker in self.lines:
            self._now[worker] = (doing, time, self._generation)


def _generations(events: Sequence[Event]) -> list[Generation]:
    found = []
    ends = ("world_broken", "world_forming", "world_finished", "job_failed")
    for place, event in enumerate(events):
        if event["event"] == "world_formed":
            later = (other["time"] for other in events[place + 1 :] if other["event"] in ends)
            end = next(later, events[-1]["time"])
            found.append(Generation(event["generation"], event["size"], event["time"], end))
    return found


def _work(events: Sequence[Event]) -> tuple[str, list[tuple[float, int]]]:
    """Return the unit of work, and how much was done when: rows of all epochs, or steps where nobody counts rows."""
    reports = [(event["time"], event["values"]) for event in events if event["event"] == "progress"]
    if any("rows" in values for _, values in reports):
        return "rows", [(t, v["epoch"] * v["rows_total"] + v["rows"]) for t, v in reports if "rows" in v]
    return "steps", [(time, values["step"]) for time, values in reports]


def _speeds(done: Sequence[tuple[float, int]], seconds: float) -> list[Speed]:
    """Return consecutive speeds, each over at least ``seconds``."""
    marks: list[tuple[float, int]] = []
    for time, work in done:
        if not marks or time - marks[-1][0] >= seconds:
            marks.append((time, work))
    return [Speed(a, b, max(after - before, 0) / (b - a)) for (a, before), (b, after) in pairwise(marks)]


def _metrics(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return rank 0's numbers over time."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["event"] == "metrics" and event["rank"] == 0:
            for name, value in event["values"].items():
                if name not in ("step", "epoch", "rows") and _is_number(value):
                    found.setdefault(name, []).append((event["time"], float(value)))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")
