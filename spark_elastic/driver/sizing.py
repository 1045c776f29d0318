"""Sizing: how many workers train if ``adaptive_np`` is set, because more workers can make steps slower.

A step takes as long as its slowest rank computes, plus the time in which ranks exchange gradients. With small networks, the
exchange takes longer than the computation that further ranks save. How long it takes depends on networks and machines, so it is
measured: if ranks spend much of a step waiting for each other, half as many are tried, and kept if they train more rows per
second.

The rows of a step must not depend on the number of workers, or rows per second could not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_elastic.protocol.records import WorldSized

# How many measurements at the beginning of a world are left out, because caches and connections are cold, and how many count. A
# measurement takes at least a second and eight steps.
WARM_UP = 1
MEASUREMENTS = 2
# A smaller size is kept only if it trains more rows per second than the larger size by this fraction.
LEAST_GAIN = 0.05
# Half as many are tried only if even the rank that computes longest waits for this fraction of a step. With twice the rows, a
# rank computes at most twice as long, so if ranks wait for less, fewer of them could hardly win.
LEAST_WAIT = 0.25


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of one size: rows per second of all ranks, and for which fraction of a step all of them waited."""

    rows_per_second: float
    waiting: float


def best_size(speeds: Mapping[int, Speed]) -> int:
    """Return which measured size to prefer: more workers, unless fewer are faster by ``LEAST_GAIN``."""
    best, *smaller = sorted(speeds, reverse=True)
    for size in smaller:
        if speeds[size].rows_per_second >= (1 + LEAST_GAIN) * speeds[best].rows_per_second:
            best = size
    return best


def size_to_try(speeds: Mapping[int, Speed], best: int, least: int) -> int | None:
    """Return an unmeasured size of at least ``least`` workers that may beat the best one; None if there is none."""
    half = max(best // 2, least)
    is_promising = half < best and speeds[best].waiting >= LEAST_WAIT
    return half if is_promising and half not in speeds else None


class Sizing:
    """Follows one job. ``limit`` is how many workers may train; None sets no limit.

    Each size is measured once: the largest that has formed, and those that are tried. A world that is smaller because workers
    were lost is not measured. is_on: whether the job wants this. least: the smallest size. warm_up, measurements: how many
    measurements of a size are left out, and how many count.
    """

    def __init__(self, is_on: bool, least: int, *, warm_up: int = WARM_UP, measurements: int = MEASUREMENTS) -> None:
        self.limit: int | None = None
        self._is_on = is_on
        self._least = least
        self._warm_up, self._measurements = warm_up, measurements
        self._speeds: dict[int, Speed] = {}
        self._generation = 0
        # What was measured in this generation.
        self._seen: list[Speed] = []

    def measured(
        self, generation: int, rows: int, period: int, own: Sequence[int], fixed: int = 0
    ) -> WorldSized | None:
        """Take a measurement of a generation. Return the decision if another size is to be tried, or if a tried size was judged.

        rows: the rows of a full step. period: microseconds from one step to the next; 0 if not known. own: the microseconds
        that each rank has computed, without the time that it waited for others. fixed: those of rank 0's that do not depend on
        its rows, which count as waiting: fewer ranks would spend them, too.
        """
        size = len(own)
        if not (self._is_on and period > 0 and self._is_wanted(size)):
            return None
        if generation != self._generation:
            self._generation, self._seen = generation, []
        self._seen.append(Speed(rows * 1e6 / period, max(0.0, 1 - (max(own) - fixed) / period)))
        counted = self._seen[self._warm_up :]
        if len(counted) < self._measurements:
            return None
        # Other load on a machine makes steps slower and never faster, so the fastest measurement is the best one.
        self._speeds[size] = max(counted, key=lambda speed: speed.rows_per_second)
        return self._decide()

    def _is_wanted(self, size: int) -> bool:
        return size > max(self._speeds, default=0) or (size == self.limit and size not in self._speeds)

    def _decide(self) -> WorldSized | None:
        was_tried, largest = self.limit is not None, max(self._speeds)
        best = best_size(self._speeds)
        tried = size_to_try(self._speeds, best, self._least)
        size = best if tried is None else tried
        self.limit = size if size < largest else None
        if self.limit is None and not was_tried:
            return None  # no other size was tried, and none will be
        sizes = sorted(self._speeds, reverse=True)
        rates = [round(self._speeds[each].rows_per_second, 1) for each in sizes]
        return WorldSized(size, tried is not None, sizes, rates)
