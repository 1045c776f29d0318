"""Takes the resets of a run apart: what each cost those who trained on, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Event = dict[str, Any]


class Kind(Enum):
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
    resets: list[Reset] = []
    start: Event | None = None
    formed: Event | None = None
    sizes = {event["generation"]: event["size"] for event in events if event["event"] == "world_forming"}
    for event in events:
        match event["event"]:
            case "world_broken" | "world_interrupted" if start is None or start["event"] == "world_interrupted":
                if start is None or event["generation"] == start["generation"]:
                    start = event if event["event"] == "world_broken" else start or event
            case "world_formed":
                formed = event
            case "stepped" | "world_finished" if (
                start is not None and formed and event["generation"] == formed["generation"]
            ):
                if formed["generation"] > start["generation"]:
                    resets.append(_take_apart(events, start, formed, sizes))
                    start = None
    if start is not None:  # the run ended in it
        resets.append(_named(start, start["time"], events[-1]["time"], old_size=sizes.get(start["generation"], 0)))
    return resets


def _take_apart(events: Sequence[Event], start: Event, formed: Event, sizes: dict[int, int]) -> Reset:
    old, new = start["generation"], formed["generation"]
    entered = [event for event in events if event["event"] == "entered" and event["generation"] == new]
    stepped = [event for event in events if event["event"] == "stepped" and event["generation"] == new]
    idle = {event["worker"]: event["values"]["idle"] for event in entered if "idle" in event["values"]}
    survivors = idle.keys()
    entered_at = max((e["time"] for e in entered if e["worker"] in survivors or not survivors), default=formed["time"])
    stepped_at = max((e["time"] for e in stepped if e["worker"] in survivors or not survivors), default=entered_at)
    worked = max((e["time"] - idle[e["worker"]] for e in entered if e["worker"] in survivors), default=start["time"])
    struck = _fault(events, start, since=worked - 1.0)
    begin = worked
    if start["event"] == "world_broken":  # those who are interrupted as planned work on until they commit
        begin = min(struck["time"] if struck else worked, start["time"])
    forming = next(e for e in events if e["event"] == "world_forming" and e["generation"] == new)
    back = [
        event["time"]
        for event in events
        if event["event"] == "worker_ready" and event["worker"] in survivors and event["generation"] == old
    ]
    marks = {
        Part.DETECT: start["time"],
        Part.ABORT: min(max(back, default=start["time"]), forming["time"]),
        Part.REGROUP: forming["time"],
        Part.CONNECT: formed["time"],
        Part.SYNC: entered_at,
        Part.STEP: stepped_at,
    }
    parts, last = {}, begin
    for part, mark in marks.items():
        parts[part] = round(max(mark - last, 0.0), 4)
        last = max(mark, last)
    return _named(
        start,
        begin,
        stepped_at,
        new_generation=new,
        old_size=sizes[old],
        new_size=sizes[new],
        lost=max(idle.values(), default=None),
        steps_lost=_steps_lost(events, start["time"], entered),
        victim=struck["rank"] if struck else None,
        parts=parts,
    )


def _named(start: Event, begin: float, end: float, **facts: Any) -> Reset:
    kind = Kind.LOSS
    if start["event"] == "world_interrupted":
        kind = Kind.DRAIN if "drain" in start["reason"] else Kind.JOIN
    return Reset(kind, start["generation"], start["reason"], begin, start["time"], end, **facts)


def _fault(events: Sequence[Event], start: Event, since: float) -> Event | None:
    """The fault that a test injected shortly before a failure was noticed."""
    if start["event"] != "world_broken":
        return None
    found = [e for e in events if e["event"] == "fault_injected" and since <= e["time"] <= start["time"]]
    return found[-1] if found else None


def _steps_lost(events: Sequence[Event], before: float, entered: Sequence[Event]) -> int:
    """Commits that were made, as far as anybody has told, and were not there any more afterwards."""
    first = {event["generation"]: event["values"]["step"] for event in events if event["event"] == "entered"}
    known = [0]
    for event in events:
        if event["event"] in ("progress", "stepped", "metrics") and event["time"] <= before:
            known.append(event["values"]["step"])
        elif event["event"] == "worker_ready" and event["time"] <= entered[0]["time"] and event["commit"] != "None":
            generation, index = map(int, event["commit"].split("."))
            known.append(first.get(generation, 0) + index)
    return max(max(known) - min(event["values"]["step"] for event in entered), 0)
