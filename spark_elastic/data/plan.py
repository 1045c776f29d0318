"""Global steps: how many rows each takes, how an epoch's tail is shared out, and each rank's share of a step.

Tail rule. A tail of fewer than ``join`` rows joins the step before it, so that no rank is left with a single row (which BatchNorm
refuses). With a batch size per worker, ``join`` is two rows per rank. With a global batch size, the rule must not depend on the
world, or a step would hold different rows in another world. There ``join`` is 16: two rows per rank in worlds of up to 8. In
larger worlds, a tail of at least 16 rows that has fewer than two per rank is shared by fewer ranks, with two or three rows
each, and the others get a repeated batch of weight 0.

With shards, the rule depends on their number instead: a tail of fewer than two rows per shard joins the step before it, and
each rank's share of a step consists of its shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spark_elastic._integers import whole_number
from spark_elastic.data.balance import apportion, even
from spark_elastic.data.order import EpochOrder
from spark_elastic.data.shards import Cut

GLOBAL_JOIN = 16


def check_switches(**given: object) -> None:
    """Raise TypeError for values other than True and False, such as "no", which would count as true."""
    for name, value in given.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, not {value!r}")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batch size as the user gave it (exactly one of the two), what happens to the tail, and the number of shards.

    balance: "auto" if ranks' shares of a global batch follow their speeds, None if they stay even.
    """

    per_worker: int | None
    overall: int | None
    drop_last: bool = False
    shards: int | None = None
    balance: str | None = None

    def __post_init__(self) -> None:
        for field, name in (("per_worker", "batch_size"), ("overall", "global_batch_size"), ("shards", "shards")):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, whole_number(name, value, 1))
        if self.shards is not None and self.per_worker is not None:
            raise ValueError(
                f"shards={self.shards} needs global_batch_size=: with batch_size={self.per_worker} per worker, steps would hold "
                "other rows in another world"
            )
        if self.balance not in (None, "auto"):
            raise ValueError(f'balance must be "auto" or None, not {self.balance!r}')
        if self.balance is not None and self.per_worker is not None:
            raise ValueError(
                f'balance="{self.balance}" needs global_batch_size=, of which ranks take unequal shares: with '
                f"batch_size={self.per_worker} each takes as many rows as the others"
            )
        if (self.per_worker is None) == (self.overall is None):
            raise ValueError(
                f"give exactly one of batch_size and global_batch_size, not batch_size={self.per_worker} and "
                f"global_batch_size={self.overall}"
            )
        if self.shards is not None and self.shards > self.smallest:
            raise ValueError(
                f"shards={self.shards} cannot be more than global_batch_size={self.overall}: a shard has at least a row"
            )

    @property
    def smallest(self) -> int:
        """The rows of a global batch in a world of one worker."""
        return self.overall or self.per_worker or 1

    @property
    def units(self) -> int:
        """The number of units (shards, or else rows) of a global batch, of which ranks' shares consist."""
        return self.shards or self.smallest

    def batch(self, size: int) -> int:
        """Rows of a full global batch in a world of ``size``."""
        return self.overall if self.overall is not None else (self.per_worker or 1) * size

    def join(self, size: int) -> int:
        """Tails with fewer rows than this join the step before them."""
        if self.shards is not None:
            return min(self.smallest, 2 * self.shards)
        if self.overall is not None:
            return min(self.overall, GLOBAL_JOIN)
        return 2 * size if (self.per_worker or 1) > 1 else 0

    def next_rows(self, left: int, size: int) -> int:
        """Return the rows of the next global step if ``left`` rows remain; 0 means that the epoch is over."""
        batch = self.batch(size)
        if self.drop_last:
            return batch if left >= batch else 0
        return left if left < batch + self.join(size) else batch

    def steps(self, left: int, size: int) -> int:
        """Return how many global steps ``left`` rows make."""
        batch, join = self.batch(size), self.join(size)
        if left <= 0:
            return 0
        if self.drop_last:
            return left // batch
        if left < batch + join:
            return 1
        full = (left - batch - join) // batch + 1
        return full + (left > full * batch)

    def sharers(self, rows: int, size: int) -> int:
        """Return how many ranks, from rank 0 on, have rows of their own in a step of ``rows`` rows."""
        if self.overall is None or self.overall < 2 * size or rows < GLOBAL_JOIN:
            return size
        return min(size, rows // 2)


@dataclass(frozen=True, slots=True)
class Step:
    """One global step: tickets [start, start + rows), and how many of them each rank has."""

    start: int
    rows: int
    rank_rows: tuple[int, ...]


def make_step(plan: BatchPlan, start: int, rows: int, size: int, shares: tuple[int, ...] = ()) -> Step:
    """Describe the global step of ``rows`` rows at position ``start`` in a world of ``size``.

    shares: each rank's units (rows or shards) of a full global batch; empty for even shares. A tail in which a rank would get a
    single row is shared out evenly.
    """
    if plan.shards is not None:
        return Step(start, rows, Cut(plan.shards, rows, shares=shares).rank_rows(size))
    if shares:
        rank_rows = apportion(rows, shares)
        if min(rank_rows) >= min(2, *shares):
            return Step(start, rows, rank_rows)
    sharers = plan.sharers(rows, size)
    return Step(start, rows, (*even(rows, sharers), *(size - sharers) * (0,)))


@dataclass(frozen=True, slots=True)
class Draw:
    """One rank's rows of consecutive steps, in order of delivery.

    lanes, positions, tickets: int64 [rows], the place of each row. offsets: int64 [steps + 1], where each step's rows begin.
    ticket_sums: for each step, the sum of the tickets that count for this rank; 0 for a repeated batch.
    """

    lanes: np.ndarray
    positions: np.ndarray
    tickets: np.ndarray
    offsets: np.ndarray
    ticket_sums: tuple[int, ...]


def draw(order: EpochOrder, steps: list[Step], rank: int) -> Draw:
    """Lay out a rank's rows of the given steps. A rank without rows in a step repeats up to two of the step's rows."""
    lanes = order.spec.lanes
    begin = np.array([[step.start] for step in steps], np.int64)
    rows = np.array([[step.rows] for step in steps], np.int64)
    low = order.given(begin)
    counts = order.given(begin + rows) - low
    before = np.cumsum(counts, axis=1) - counts
    own = np.array([step.rank_rows[rank] for step in steps], np.int64)
    start = np.array([[sum(step.rank_rows[:rank])] for step in steps], np.int64)
    start[own == 0] = 0
    stop = start + np.where(own == 0, np.minimum(rows[:, 0], 2), own)[:, None]
    first = np.clip(start - before, 0, counts)
    last = np.clip(stop - before, 0, counts)
    taken = (last - first).ravel()
    ends = np.cumsum(taken)
    total = int(ends[-1])
    numbers = np.tile(np.arange(lanes, dtype=np.int64), len(steps))
    lane_of = np.repeat(numbers, taken)
    positions = np.repeat((low + first).ravel() - (ends - taken), taken) + np.arange(total, dtype=np.int64)
    offsets = np.concatenate([[0], ends[lanes - 1 :: lanes]])
    tickets = positions * lanes + lane_of
    sums = np.add.reduceat(tickets, offsets[:-1]) * (own > 0)
    return Draw(lane_of, positions, tickets, offsets, tuple(sums.tolist()))
