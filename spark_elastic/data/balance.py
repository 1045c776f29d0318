"""Balance: how many rows of a global batch each rank takes, in proportion to how fast it has computed its rows so far.

A global step is as slow as its slowest rank. What is decided here is a pure function of numbers that all ranks have exchanged, so
all ranks decide the same. "Units" are what shares consist of: rows, or whole shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# A change costs each rank that it reads ahead anew. It is made where steps are predicted to take at least so much less time.
LEAST_GAIN = 0.05
# A change goes so far of the way to the shares that the speeds ask for, because speeds change, too.
DAMPING = 0.75
# No rank has more than so many times the units of an even share: batches have to fit into memory.
MOST = 2.0
# A rank with at least so many units of an even share keeps as many: batch normalization refuses a single row.
LEAST = 2


@dataclass(frozen=True, slots=True)
class Change:
    """A change of shares, and the microseconds that each rank needed for the shares before it. unit: "rows" or "shards"."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    microseconds: tuple[int, ...]
    unit: str


def even(units: int, size: int) -> tuple[int, ...]:
    """Return the shares of ``size`` ranks that differ by 1 at most."""
    return tuple((rank + 1) * units // size - rank * units // size for rank in range(size))


def balanced(shares: Sequence[int], seconds: Sequence[float], least: int = LEAST) -> tuple[int, ...]:
    """Return the shares for the next steps; the same ones if others would gain too little.

    shares: the units that each rank has had in each step. seconds: what a rank has needed for them, in rank order, without the
    time that it waited for others. Ranks whose seconds are not positive have not been measured, and nothing changes.
    """
    units, size = sum(shares), len(shares)
    low = min(least, units // size)
    if low < 1 or min(seconds) <= 0:
        return tuple(shares)
    high = MOST * units / size
    assert all(low <= share <= high for share in shares), shares
    speeds = [share / needed for share, needed in zip(shares, seconds, strict=True)]
    wanted = _in_proportion(units, speeds, low, high)
    damped = [share + DAMPING * (want - share) for share, want in zip(shares, wanted, strict=True)]
    chosen = _whole(units, damped, speeds, high)
    then = max(share / speed for share, speed in zip(chosen, speeds, strict=True))
    return chosen if then <= (1 - LEAST_GAIN) * max(seconds) else tuple(shares)


def cut(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Cut the rows of a step in proportion to shares. Of as many rows as there are units, each rank gets its share."""
    bounds = [taken * rows // sum(shares) for taken in itertools.accumulate(shares, initial=0)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def _in_proportion(units: int, speeds: Sequence[float], low: float, high: float) -> list[float]:
    """Return shares from ``low`` to ``high`` that all ranks compute in one time, but for those that are at a limit."""

    def done_in(seconds: float) -> list[float]:
        return [min(max(seconds * speed, low), high) for speed in speeds]

    short, long = 0.0, high / min(speeds)
    for _ in range(60):
        middle = (short + long) / 2
        short, long = (middle, long) if sum(done_in(middle)) < units else (short, middle)
    return done_in(long)


def _whole(units: int, shares: Sequence[float], speeds: Sequence[float], high: float) -> tuple[int, ...]:
    """Round shares down. What is left over goes, one unit at a time, to the rank that would be done with it first."""
    whole = [int(share) for share in shares]
    for _ in range(units - sum(whole)):
        able = [rank for rank, share in enumerate(whole) if share + 1 <= high]
        whole[min(able, key=lambda rank: (whole[rank] + 1) / speeds[rank])] += 1
    return tuple(whole)
