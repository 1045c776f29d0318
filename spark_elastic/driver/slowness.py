"""Slowness: which rank computes much more slowly than the others, and when its worker may be replaced for that.

A rank's speed is its rows, or shards, per second of its own part of a step. It is compared with the median of the others. One
measurement may be chance, so several in a row decide. A rank that ``balance="auto"`` has relieved seems slower than it is,
because not all of a step is in proportion to rows: the first of these measurements gives it the benefit of the doubt.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.workers import Worker

# How many measurements in a row have to find a rank too slow. A measurement takes at least a second and eight steps.
MEASUREMENTS = 3
# A rank below this fraction of the others' speed is reported in any job: all ranks wait for it in every step.
TOLD_BELOW = 0.5
# For this many seconds after a replacement, the place gets no worker and no other worker is replaced. Each replacement doubles
# the time: if the user's code makes one rank slow, whichever worker has it, replacing the worker does not help.
SHORTEST_PAUSE = 60.0
LONGEST_PAUSE = 1800.0


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is too slow. It needs ``times`` times as long for a row as the median of the others."""

    rank: int
    times: float


class Slowness:
    """Judges the measurements of one job. A rank is too slow below ``limit`` times the others' speed; None sets no limit."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._generation = 0
        # How many measurements in a row have found each rank of the generation too slow.
        self._counts: list[int] = []

    def measured(self, generation: int, shares: Sequence[int], microseconds: Sequence[int]) -> SlowRank | None:
        """Take a measurement of all ranks of a generation, in rank order. Return the slowest of those that are too slow."""
        if self._limit is None or len(shares) < 2:
            return None
        if generation != self._generation:
            self._generation, self._counts = generation, [0] * len(shares)
        if min(shares) == 0:  # the global batch has fewer rows than ranks; a rank without rows has no speed
            self._counts = [0] * len(shares)
            return None
        even = sum(shares) / len(shares)
        speeds = [share / needed for share, needed in zip(shares, microseconds, strict=True)]
        usual = [statistics.median(speeds[:rank] + speeds[rank + 1 :]) for rank in range(len(speeds))]
        for rank, speed in enumerate(speeds):
            at_best = speed if self._counts[rank] else max(shares[rank], even) / microseconds[rank]
            self._counts[rank] = self._counts[rank] + 1 if at_best < self._limit * usual[rank] else 0
        slow = [
            SlowRank(rank, round(usual[rank] / max(speeds[rank], 1e-9), 1))
            for rank, count in enumerate(self._counts)
            if count >= MEASUREMENTS
        ]
        return max(slow, key=lambda found: found.times, default=None)


class Replacements:
    """Decides when workers that are too slow may be replaced: one at a time, after ever longer pauses."""

    def __init__(self) -> None:
        self._pause = SHORTEST_PAUSE
        self._paused_until = 0.0

    def are_paused(self, now: float) -> bool:
        """Whether the last replacement is too recent for another one."""
        return now < self._paused_until

    def begin(self, now: float) -> float:
        """Note that a worker is replaced. Return for how many seconds its place gets no worker."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._paused_until = now + pause
        return pause


def may_replace(seen: Situation) -> bool:
    """Whether a member may be told to leave now: the world trains, nobody has returned, and nobody is already leaving."""
    return (
        seen.world is not None
        and seen.world.phase is WorldPhase.RUNNING
        and not any(worker.phase is WorkerPhase.VOTED or seen.is_draining(worker) for worker in seen.members)
    )


def can_spare(seen: Situation, worker: Worker) -> bool:
    """Whether ``min_np`` workers are left without this member, including newcomers that are ready."""
    return len(seen.members) - 1 + len(seen.newcomers) >= seen.settings.min_np
