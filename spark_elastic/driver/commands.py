"""What the ``DriverMachine`` wants done. Imperative; the service executes them in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_elastic.errors import SparkElasticError
from spark_elastic.messages import Member


@dataclass(frozen=True, slots=True)
class StartWorker:
    host: int
    worker: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    host: int
    worker: int


@dataclass(frozen=True, slots=True)
class RestartTask:
    """Let the task raise, so that Spark starts it anew, perhaps elsewhere."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseTask:
    host: int


@dataclass(frozen=True, slots=True)
class YieldSlots:
    """Give all slots back to Spark and ask for them again later: another run may be waiting for them."""


@dataclass(frozen=True, slots=True)
class FormWorld:
    generation: int
    members: tuple[Member, ...]
    previous_size: int


@dataclass(frozen=True, slots=True)
class InterruptWorld:
    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbortWorld:
    generation: int
    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FinishWorld:
    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaveJob:
    worker: int


@dataclass(frozen=True, slots=True)
class FinishJob:
    """All results are there; ``workers`` are in rank order."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailJob:
    error: SparkElasticError


@dataclass(frozen=True, slots=True)
class Record:
    """Write an entry into the event log."""

    kind: str
    fields: dict[str, object] = field(default_factory=dict)


Command = (
    StartWorker
    | KillWorker
    | RestartTask
    | ReleaseTask
    | YieldSlots
    | FormWorld
    | InterruptWorld
    | AbortWorld
    | FinishWorld
    | LeaveJob
    | FinishJob
    | FailJob
    | Record
)
