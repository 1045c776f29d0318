"""Balance: how many rows of a global batch each rank takes, in proportion to how fast it has computed its rows so far.

A global step is as slow as its slowest rank. Decisions are a pure function of numbers that all ranks have exchanged, so all
ranks decide the same. Shares consist of "units": rows, or whole shards.

A part of a step takes as long however many units a rank has: the optimizer, the commit, calls of small kernels. On each rank it
takes as long as a certain number of units, the "overhead", because all run the same code. So a rank's time is in proportion to
its share and the overhead together.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# After a change each rank has to read ahead again. So a change has to save at least this fraction of a step's time, as predicted;
# and DOUBT divided by the number of measurements more, because times vary by chance. At most MOST_MEASUREMENTS count, the newest.
LEAST_GAIN = 0.03
DOUBT = 0.12
MOST_MEASUREMENTS = 8
# If a rank's time differs from the mean of the earlier ones by this factor, its speed has changed, and those no longer count.
CHANGED = 1.5
# A change goes only this fraction of the way to the ideal shares, because speeds change, too.
DAMPING = 0.75
# No rank takes more than this multiple of an even share, because batches have to fit into memory.
MOST = 2.0
# The overhead is estimated when a rank's share changes by at least this fraction. It is at most this multiple of an even share.
ENOUGH = 0.2
MOST_OVERHEAD = 4.0
# A rank whose even share has at least this many units keeps at least as many, because batch normalization refuses a single row.
LEAST = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Each rank's microseconds for its share ``before``, and its share from now on, often the same.

    unit: "rows" or "shards". period: this rank's microseconds from one step to the next; 0 if not known. rows: the rows of a
    full step. fixed: this rank's microseconds for what follows its gradients, which do not depend on its share.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    microseconds: tuple[int, ...]
    unit: str
    period: int
    rows: int
    fixed: int


class Balancer:
    """Decides on the shares of one world, from the mean of what was measured with the present ones.

    The times before and after a change tell the overhead. All ranks learn the same.
    """

    def __init__(self) -> None:
        self._shares: tuple[int, ...] = ()
        # Each rank's seconds with these shares, measurement by measurement.
        self._measured: deque[Sequence[float]] = deque(maxlen=MOST_MEASUREMENTS)
        # The shares before the last changes, from which the present ones may differ by too little to tell the overhead, and each
        # rank's mean seconds with them.
        self._before: tuple[tuple[int, ...], Sequence[float]] | None = None
        self._overhead: float | None = None

    def decide(self, shares: tuple[int, ...], seconds: Sequence[float], least: int = LEAST) -> tuple[int, ...]:
        """Return the shares for the next steps, as ``balanced`` does; ``seconds`` were measured with ``shares``."""
        if shares != self._shares:
            self._measured.clear()
        elif self._has_changed(seconds):
            self._measured.clear()
            self._before = None
        self._shares = shares
        self._measured.append(seconds)
        mean = self._mean()
        found = None if self._before is None else estimate_overhead(*self._before, shares, mean)
        known = [each for each in (self._overhead, found) if each is not None]
        overhead = statistics.fmean(known) if known else None
        gain = LEAST_GAIN + DOUBT / len(self._measured)
        chosen = balanced(shares, mean, least, overhead or 0.0, gain)
        if chosen != shares:
            self._overhead = overhead
            if self._before is None or found is not None:
                self._before = shares, mean
        return chosen

    def _mean(self) -> list[float]:
        return [statistics.fmean(own) for own in zip(*self._measured, strict=True)]

    def _has_changed(self, seconds: Sequence[float]) -> bool:
        """Whether these seconds come from other speeds than those before."""
        pairs = zip(self._mean(), seconds, strict=True) if self._measured else ()
        return any(max(then, now) > CHANGED * min(then, now) for then, now in pairs)


def even(units: int, size: int) -> tuple[int, ...]:
    """Return the shares of ``size`` ranks that differ by 1 at most."""
    return tuple((rank + 1) * units // size - rank * units // size for rank in range(size))


def estimate_overhead(
    shares_before: Sequence[int], seconds_before: Sequence[float], shares: Sequence[int], seconds: Sequence[float]
) -> float | None:
    """Return the overhead that explains how the time of the rank with the largest change has changed; None if that is small."""
    _, rank = max(
        (abs(now - then) / then, rank) for rank, (then, now) in enumerate(zip(shares_before, shares, strict=True))
    )
    then, now = shares_before[rank], shares[rank]
    if abs(now - then) < ENOUGH * then:
        return None
    most = MOST_OVERHEAD * sum(shares) / len(shares)
    slower = seconds[rank] / seconds_before[rank]
    if (slower - 1) * (now - then) <= 0:
        return most  # the share made no difference
    return min(max((slower * then - now) / (1 - slower), 0.0), most)


def balanced(
    shares: Sequence[int],
    seconds: Sequence[float],
    least: int = LEAST,
    overhead: float = 0.0,
    gain: float = LEAST_GAIN,
) -> tuple[int, ...]:
    """Return the shares for the next steps; the same ones if others would save less than a fraction ``gain`` of a step's time.

    shares: each rank's units in each step. seconds: each rank's time for them, in rank order, without its waiting for others.
    If some rank's seconds are not positive, it has not been measured, and nothing changes. overhead: in units.
    """
    units, size = sum(shares), len(shares)
    low = min(least, units // size)
    if low < 1 or min(seconds) <= 0:
        return tuple(shares)
    high = MOST * units / size
    assert all(low <= share <= high for share in shares), shares
    speeds = [(share + overhead) / needed for share, needed in zip(shares, seconds, strict=True)]
    wanted = _in_proportion(units, speeds, low, high, overhead)
    damped = [share + DAMPING * (want - share) for share, want in zip(shares, wanted, strict=True)]
    chosen = _whole(units, damped, speeds, high, overhead)
    then = max(_predicted(shares, seconds, chosen, overhead))
    return chosen if then <= (1 - gain) * max(seconds) else tuple(shares)


def apportion(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Cut the rows of a step in proportion to shares. If there are as many rows as units, each rank gets exactly its share."""
    bounds = [taken * rows // sum(shares) for taken in itertools.accumulate(shares, initial=0)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def _predicted(shares: Sequence[int], seconds: Sequence[float], chosen: Sequence[int], overhead: float) -> list[float]:
    """Return the seconds that each rank will need for ``chosen`` shares."""
    return [
        needed * (after + overhead) / (before + overhead)
        for before, needed, after in zip(shares, seconds, chosen, strict=True)
    ]


def _in_proportion(units: int, speeds: Sequence[float], low: float, high: float, overhead: float) -> list[float]:
    """Return shares from ``low`` to ``high`` that all ranks compute in equal time, except for ranks at a limit."""

    def done_in(seconds: float) -> list[float]:
        return [min(max(seconds * speed - overhead, low), high) for speed in speeds]

    short, long = 0.0, (high + overhead) / min(speeds)
    for _ in range(60):
        middle = (short + long) / 2
        short, long = (middle, long) if sum(done_in(middle)) < units else (short, middle)
    return done_in(long)


def _whole(
    units: int, shares: Sequence[float], speeds: Sequence[float], high: float, overhead: float
) -> tuple[int, ...]:
    """Round shares down. The remaining units go, one at a time, to the rank that would finish the unit first."""
    whole = [int(share) for share in shares]
    for _ in range(units - sum(whole)):
        able = [rank for rank, share in enumerate(whole) if share + 1 <= high]
        whole[min(able, key=lambda rank: (whole[rank] + 1 + overhead) / speeds[rank])] += 1
    return tuple(whole)
