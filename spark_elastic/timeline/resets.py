"""Takes the resets of a run apart: what each cost those who trained on, and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Event = dict[str, Any]

# An injected fault is the cause of a loss if it struck at most this long before the survivors' last commit.
FAULT_SECONDS = 1.0


class Kind(Enum):
    """Why a world ended."""

    LOSS = "loss"
    JOIN = "join"
    DRAIN = "drain"


class Part(Enum):
    """What a reset's time goes into, in this order. The value says it to people."""

    DETECT = "notice"
    ABORT = "leave the step"
    REGROUP = "wait for workers"
    CONNECT = "connect"
    SYNC = "sync state"
    STEP = "first step"


@dataclass(frozen=True)
class Reset:
    """One reset, from the last sign of work before it to the first step after it. Times as in the log.

    ``begin`` is the fault where one was injected, else the survivors' last commit: what it was that happened, and when, nobody
    knows. ``lost`` are the seconds that survivors did no work that counts; it ends where they enter the function again, so the
    first step is not in it, and is None where nobody survived or training did not go on.
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


def find_resets(events: Sequence[Event]) -> list[Reset]:
    """Find the resets in the events of one run. Worlds that broke before they trained belong to the reset before."""
    log = _Log.of(events)
    resets: list[Reset] = []
    start: Event | None = None
    later: Event | None = None  # another reset has begun before this one was over
    formed: Event | None = None
    known = 0
    for event in events:
        kind, generation = event["event"], event.get("generation", 0)
        if start is None or generation <= start["generation"]:
            known = max(known, log.step_of(event))
        if kind == "world_formed":
            formed = event
        elif kind in ("world_broken", "world_interrupted"):
            is_same = start is not None and generation == start["generation"]
            # What began as a planned departure can still become a failure.
            if start is None or (is_same and kind == "world_broken"):
                start = event
            elif not is_same:
                later = event
        elif kind in ("stepped", "world_finished") and start and formed and generation > start["generation"]:
            resets.append(_take_apart(log, start, formed, known))
            start = later if later is not None and later["generation"] == generation else None
            later = None
    if start is not None:  # the run ended during this reset
        size = log.forming[start["generation"]]["size"]
        resets.append(_named(start, start["time"], events[-1]["time"], old_size=size))
    return resets


@dataclass(frozen=True)
class _Log:
    """The events that resets are made of, by generation."""

    forming: dict[int, Event]
    entered: dict[int, list[Event]]
    stepped: dict[int, list[Event]]
    ready: dict[int, list[Event]]
    faults: list[Event]

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Log:
        log = cls({}, defaultdict(list), defaultdict(list), defaultdict(list), [])
        by_generation = {"entered": log.entered, "stepped": log.stepped, "worker_ready": log.ready}
        for event in events:
            if event["event"] == "world_forming":
                log.forming[event["generation"]] = event
            elif event["event"] == "fault_injected":
                log.faults.append(event)
            elif event["event"] in by_generation:
                by_generation[event["event"]][event["generation"]].append(event)
        return log

    def step_of(self, event: Event) -> int:
        """Return how many commits had been made at an event, as far as it tells; else 0."""
        if event["event"] in ("progress", "stepped"):
            return int(event["values"]["step"])
        if event["event"] == "worker_ready" and event["commit"] != "None":
            generation, index = map(int, event["commit"].split("."))
            return int(min((e["values"]["step"] for e in self.entered[generation]), default=0)) + index
        return 0


def _take_apart(log: _Log, start: Event, formed: Event, known: int) -> Reset:
    """Make a reset of its first event and the forming of the world that trained on; ``known`` commits were made before it."""
    old, new = start["generation"], formed["generation"]
    entered, stepped, forming = log.entered[new], log.stepped[new], log.forming[new]
    idle = {event["worker"]: event["values"]["idle"] for event in entered if "idle" in event["values"]}

    def latest(events: Sequence[Event], default: float) -> float:
        """Return when the last survivor did something; where nobody survived, when the last newcomer did."""
        return max((event["time"] for event in events if event["worker"] in idle or not idle), default=default)

    worked = max((e["time"] - idle[e["worker"]] for e in entered if e["worker"] in idle), default=start["time"])
    begin, victim = worked, None
    if start["event"] == "world_broken":  # workers that are interrupted as planned go on training until they commit
        # A fault strikes at a commit, which others may make later.
        struck = [event for event in log.faults if worked - FAULT_SECONDS <= event["time"] <= start["time"]]
        begin = min(struck[-1]["time"] if struck else worked, start["time"])
        victim = struck[-1]["rank"] if struck else None
    entered_at = latest(entered, formed["time"])
    marks = {
        Part.DETECT: start["time"],
        Part.ABORT: min(latest(log.ready[old], start["time"]), forming["time"]),
        Part.REGROUP: forming["time"],
        Part.CONNECT: formed["time"],
        Part.SYNC: entered_at,
        Part.STEP: latest(stepped, entered_at),
    }
    parts, last = {}, begin
    for part, mark in marks.items():
        parts[part] = round(max(mark - last, 0.0), 4)
        last = max(mark, last)
    return _named(
        start,
        begin,
        last,
        new_generation=new,
        old_size=log.forming[old]["size"],
        new_size=forming["size"],
        lost=max(idle.values(), default=None),
        steps_lost=max(known - min((event["values"]["step"] for event in entered), default=known), 0),
        victim=victim,
        parts=parts,
    )


def _named(start: Event, begin: float, end: float, **facts: Any) -> Reset:
    kind = Kind.LOSS
    if start["event"] == "world_interrupted":
        kind = Kind.DRAIN if "drain" in start["reason"] else Kind.JOIN
    return Reset(kind, start["generation"], start["reason"], begin, start["time"], end, **facts)
