"""The reports of workers: the events of the log that come from training processes, with one class for each kind.

``records`` has the driver's own records. One of them, ``WorkerReported``, adds to a report which worker made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import msgspec

# A rank counts as slow if it needs this many times as long for a row as the fastest rank.
SLOW = 1.25


def kind_of(name: str) -> str:
    """Return the name of a class's events: ``world_formed`` for ``WorldFormed``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _Report(msgspec.Struct, frozen=True, tag_field="event", tag=kind_of, omit_defaults=True):
    """Base of a worker's reports, which become an event's ``values``. Fields that are None are left out there."""


class Entered(_Report, frozen=True):
    """A worker has the state and enters the user's function.

    step: commits made before
    idle: seconds since the worker's last commit, or since it last entered; missing for a newcomer
    """

    step: int
    idle: float | None = None


class Stepped(_Report, frozen=True):
    """A worker has made its first commit of the generation."""

    step: int


class Progress(_Report, frozen=True):
    """How far rank 0 is, reported at most twice a second. All but the first field are there only if the state has a loader.

    step: commits of the job so far
    epoch: from 0
    rows: of the epoch, on all ranks
    rows_total: of an epoch
    rows_trained: of all epochs so far, as commits have counted them; missing in logs of earlier releases
    """

    step: int
    epoch: int | None = None
    rows: int | None = None
    rows_total: int | None = None
    rows_trained: int | None = None

    @property
    def rows_done(self) -> int | None:
        """The rows of all epochs so far; None if nobody counts them."""
        if self.rows_trained is not None:
            return self.rows_trained
        if self.epoch is None or self.rows is None or self.rows_total is None:
            return None
        return self.epoch * self.rows_total + self.rows

    @property
    def done(self) -> int:
        """The work done so far: rows of all epochs, or steps if nobody counts rows."""
        return self.step if self.rows_done is None else self.rows_done


class Metrics(_Report, frozen=True):
    """What a worker passed to ``state.report``.

    values: numbers and strings, also ``"NaN"`` and ``"Infinity"``, by their names; ``step`` among them is the number of commits
    """

    values: dict[str, float | int | str]


class GpuUsed(_Report, frozen=True):
    """How a worker uses its GPU, reported at a commit, at most every five seconds; missing if it has used none.

    memory: bytes that torch's allocator holds on the GPU
    utilization: percent of the last second in which the GPU computed, for any process; missing if NVML does not tell
    """

    memory: int
    utilization: int | None = None


class SharesChanged(_Report, frozen=True):
    """The ranks' shares of a global batch change, because some compute faster than others. Lists are in rank order.

    step: commits of the job so far
    before: rows of each rank in a step so far
    after: rows from the next step on
    seconds: how long each rank has needed for its part of a step, without the time that it waited for others
    unit: what is counted, rows or shards
    """

    step: int
    before: list[int]
    after: list[int]
    seconds: list[float]
    unit: str = "rows"

    def __post_init__(self) -> None:
        if not 0 < len(self.before) == len(self.after) == len(self.seconds):
            raise ValueError("before, after and seconds have a number for each rank")
        if min(*self.before, *self.after) < 0 or min(self.seconds) <= 0:
            raise ValueError("parts of a step and seconds are positive")

    @property
    def slowness(self) -> list[float]:
        """How many times as long each rank has needed for a row as the fastest rank."""
        each = [seconds / max(share, 1) for seconds, share in zip(self.seconds, self.before, strict=True)]
        return [seconds / min(each) for seconds in each]

    @property
    def slow_rank(self) -> int | None:
        """The slowest rank, if it counts as slow and has been given a smaller share."""
        rank = self.slowness.index(max(self.slowness))
        return rank if self.slowness[rank] >= SLOW and self.after[rank] < self.before[rank] else None

    def describe(self, name: Callable[[int], str]) -> str:
        """Say which rank is slow and what was done. ``name`` returns what to call a rank."""
        whole, rank = sum(self.after), self.slow_rank
        if rank is None:
            return f"parts of a step follow speeds: of {whole} {self.unit} ranks take {', '.join(map(str, self.after))}"
        return (
            f"{name(rank)} is slow: a row takes it {self.slowness[rank]:.1f} times as long as the fastest rank, and of the "
            f"{whole} {self.unit} of a step it takes {self.after[rank]} instead of {self.before[rank]}"
        )


class CheckpointWritten(_Report, frozen=True):
    """A commit has been written to the durable checkpoint."""

    name: str
    step: int
    bytes: int
    seconds: float


class CheckpointFailed(_Report, frozen=True):
    """A commit could not be written to the durable checkpoint."""

    name: str
    step: int
    error: str


class CheckpointRestored(_Report, frozen=True):
    """The job continues from a durable checkpoint."""

    name: str
    step: int


class CheckpointDamaged(_Report, frozen=True):
    """A durable checkpoint is damaged, and was skipped."""

    name: str


class CheckpointSuperseded(_Report, frozen=True):
    """A later run has taken over the checkpoint directory; this run no longer writes to it."""

    name: str


Report = (
    Entered
    | Stepped
    | Progress
    | Metrics
    | GpuUsed
    | SharesChanged
    | CheckpointWritten
    | CheckpointFailed
    | CheckpointRestored
    | CheckpointDamaged
    | CheckpointSuperseded
)

# The classes by the kinds of their events.
REPORTS: dict[str, type[Report]] = {kind_of(each.__name__): each for each in get_args(Report)}
