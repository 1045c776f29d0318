"""Balance: how many rows of a global batch each rank takes, in proportion to how fast it has computed its rows so far.

A global step is as slow as its slowest rank. Decisions are a pure function of numbers that all ranks have exchanged, so all
ranks decide the same. Shares consist of "units": rows, or whole shards.

A part of a step takes as long however many units a rank has: the optimizer, the commit, calls of small kernels. On each rank it
takes as long as a certain number of units, the "overhead", because all run the same code. So a rank's time is in proportion to
its share and the overhead together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# After a change each rank has to read ahead again. So a change has to save at least this fraction of a step's time, as predicted.
LEAST_GAIN = 0.05
# A change goes only this fraction of the way to the ideal shares, because speeds change, too.
DAMPING = 0.75
# No rank takes more than this multiple of an even share, because batches have to fit into memory.
MOST = 2.0
# After a disappointing change at most this many decisions are skipped, and a step that is slower by this factor ends the pause.
LONGEST_PAUSE = 64
PATIENCE = 1.25
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
    """Decides on the shares of one world. It learns from the effect of earlier changes, and all ranks learn the same.

    The times before and after a change tell the overhead. If a change saves less than half of the predicted time, a pause
    follows, twice as long as the last one: times vary by chance. A change that saves more shortens the next pause. A step that
    takes much longer than before ends a pause.
    """

    def __init__(self) -> None:
        # The shares before the last change with each rank's seconds, and the seconds predicted for a step after it; None once
        # they were compared with the actual ones.
        self._promise: tuple[tuple[int, ...], Sequence[float], float] | None = None
        self._overhead: float | None = None
        # How many decisions to skip from now on, and how many after the next disappointing change.
        self._left_out, self._pause = 0, 1
        self._paused_at = 0.0

    def decide(self, shares: tuple[int, ...], seconds: Sequence[float], least: int = LEAST) -> tuple[int, ...]:
        """Return the shares for the next steps, as ``balanced`` does, or the same ones during a pause."""
        now = max(seconds)
        self._judge(shares, seconds)
        if self._left_out and now < PATIENCE * self._paused_at:
            self._left_out -= 1
            return shares
        overhead = self._overhead or 0.0
        chosen = balanced(shares, seconds, least, overhead)
        if chosen != shares:
            self._promise = shares, seconds, max(_predicted(shares, seconds, chosen, overhead))
        return chosen

    def _judge(self, shares: tuple[int, ...], seconds: Sequence[float]) -> None:
        """Compare the times of a step with those before the last change, and with what was predicted."""
        if self._promise is None:
            return
        shares_before, seconds_before, predicted = self._promise
        self._promise = None
        found = estimate_overhead(shares_before, seconds_before, shares, seconds)
        if found is not None:
            self._overhead = found if self._overhead is None else (self._overhead + found) / 2
        before, now = max(seconds_before), max(seconds)
        if now > (before + predicted) / 2:
            self._left_out, self._paused_at = self._pause, now
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            self._left_out, self._pause = 0, max(1, self._pause // 2)


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
    shares: Sequence[int], seconds: Sequence[float], least: int = LEAST, overhead: float = 0.0
) -> tuple[int, ...]:
    """Return the shares for the next steps; the same ones if others would gain too little.

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
    return chosen if then <= (1 - LEAST_GAIN) * max(seconds) else tuple(shares)


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
