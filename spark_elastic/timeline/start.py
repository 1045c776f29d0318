"""The start of a run, up to the first step: what it waited for, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from spark_elastic.protocol import records, reports
from spark_elastic.protocol.gathering import Gathering
from spark_elastic.protocol.records import Entry, Record, WorkerReported


class Stage(Enum):
    """What the start of a run waits for. The value is the wording for people."""

    SLOTS = "wait for slots"
    IMPORTS = "start workers, which import torch"
    FIRST_LINES = "run the function's first lines"
    CONNECT = "connect"
    SYNC = "sync state"
    STEP = "first step"


_OF_A_WORLD = (Stage.CONNECT, Stage.SYNC, Stage.STEP)


@dataclass(frozen=True)
class Wait:
    """One stage of the start. ``detail`` counts the slots or workers at its end."""

    stage: Stage
    start: float
    end: float
    detail: str


def find_start(entries: Sequence[Entry]) -> list[Wait]:
    """Find what the start waited for, from the entries of one run; up to its end if it never made a step."""
    waits: list[Wait] = []
    crowd = _Crowd()
    present: tuple[Stage, float] | None = None
    for entry in entries:
        crowd.see(entry.record)
        stage = crowd.stage
        if present is not None and stage is not present[0]:
            # A function without an elastic part consists only of first lines, and its result shows their end.
            if not (isinstance(entry.record, records.ResultArrived) and present[0] is Stage.FIRST_LINES):
                waits.append(Wait(*present, entry.time, crowd.count(present[0])))
            present = None
        if stage is None:
            return waits
        present = present or (stage, entry.time)
    if present is not None:
        waits.append(Wait(*present, entries[-1].time, crowd.count(present[0])))
    return waits


@dataclass
class _Crowd:
    """The hosts and workers while the first world gathers. ``stage`` is what all wait for; None from the first step on."""

    stage: Stage | None = Stage.SLOTS
    _size: int = 0
    _there: Gathering = field(default_factory=Gathering)

    def see(self, record: Record) -> None:
        self._there.see(record)
        match record:
            case records.JobStarted(num_proc=num_proc):
                self._size = num_proc
            case records.WorldForming(size=size):
                self._size, self.stage = size, Stage.CONNECT
            case records.WorldFormed():
                self.stage = Stage.SYNC
            case WorkerReported(report=reports.Entered()):
                self.stage = Stage.STEP
            case WorkerReported(report=reports.Stepped()):
                self.stage = None
            case records.WorldFinished() | records.ResultArrived() | records.JobFinished() | records.JobFailed():
                self.stage = None
            case records.WorldBroken():
                self.stage = self._gathering
            case _ if self.stage not in _OF_A_WORLD:  # there, arrivals make no difference, also if noted late
                self.stage = self._gathering

    @property
    def _gathering(self) -> Stage:
        there = self._there
        workers = len(there.starting | there.running | there.ready)
        if max(len(there.hosts), workers) < self._size:
            return Stage.SLOTS
        return Stage.IMPORTS if there.starting or workers < self._size else Stage.FIRST_LINES

    def count(self, stage: Stage) -> str:
        """Say how many of a stage's slots or workers are there."""
        there = {
            Stage.SLOTS: (len(self._there.hosts), "slots are there"),
            Stage.IMPORTS: (len(self._there.running | self._there.ready), "workers run"),
            Stage.FIRST_LINES: (len(self._there.ready), "workers are ready"),
        }
        return f"{there[stage][0]} of {self._size} {there[stage][1]}" if stage in there else ""
