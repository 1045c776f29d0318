"""Tracks which rows of an epoch have been processed, which rank gets the rest, and whether all ranks agree on that.

Rows are consumed in one order that does not depend on the world, so (epoch, position) determines what has been processed: two
integers for a billion rows. A reset needs no negotiation, because each rank computes its new share from the position. The
ranks' exchange at commits does not find the position, but proves it: each rank reports how many rows it really delivered and
the sum of their tickets, and all ranks check that the reports add up to what the steps held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spark_elastic._saved_names import saved_as
from spark_elastic.data.order import EpochOrder, OrderSpec, Piece
from spark_elastic.data.plan import BatchPlan, Step, make_step
from spark_elastic.errors import DataError, final

_MODULUS = 1 << 61


class Report(NamedTuple):
    """What one rank says at a commit: its position, and the rows delivered here since the last report with their tickets."""

    epoch: int = 0
    position: int = 0
    rows: int = 0
    # The sum of the rows' tickets, which are their places in the epoch's order.
    tickets: int = 0


@dataclass(frozen=True, slots=True)
class Pending:
    """An unfinished row group: its index in the manifest, its number of processed rows, and its number of rows."""

    group: int
    processed: int
    rows: int


@dataclass(slots=True)
class _Interval:
    """The rows delivered here, and those that all ranks together should have delivered, since the last report."""

    delivered_rows: int = 0
    delivered_tickets: int = 0
    expected_rows: int = 0
    expected_tickets: int = 0


@saved_as("spark_elastic.data")
class RowGroupTracker:
    """The position of one rank in a dataset whose row groups have ``rows`` rows (int64, as counted after filters)."""

    def __init__(self, rows: np.ndarray, spec: OrderSpec, plan: BatchPlan) -> None:
        self.rows = np.asarray(rows, np.int64)
        self.spec = spec
        self.plan = plan
        self.total = int(self.rows.sum())
        self.rank, self.size = 0, 1
        # Each rank's units (rows or shards) of a full global batch, in rank order; empty for even shares.
        self.shares: tuple[int, ...] = ()
        self.epoch, self.position = 0, 0
        self._order: EpochOrder | None = None
        # The rows of all steps so far, on all ranks, also of those that were delivered again.
        self.rows_delivered = 0
        self._interval = _Interval()
        self._awaited: deque[Report] = deque()

    @property
    def order(self) -> EpochOrder:
        """The order of the current epoch."""
        if self._order is None or self._order.epoch != self.epoch:
            self._order = EpochOrder(self.rows, self.epoch, self.spec)
        return self._order

    @property
    def left(self) -> int:
        """Rows of the epoch not yet delivered, including those that drop_last will drop."""
        return self.total - self.position

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no further step."""
        return self.plan.next_rows(self.left, self.size) == 0

    def set_world(self, rank: int, size: int) -> None:
        """Take a rank in a world. The steps from the present position on are divided again, evenly; reports start afresh."""
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} must be from 0 and below size={size}")
        self.rank, self.size, self.shares = rank, size, ()
        self._interval = _Interval()
        self._awaited.clear()

    def divide(self, shares: tuple[int, ...]) -> None:
        """Divide the steps from here on by these shares of a full global batch. All ranks have to do so at the same position."""
        assert len(shares) == self.size, (shares, self.size)
        assert sum(shares) == self.plan.units, (shares, self.plan)
        self.shares = shares

    def seek(self, epoch: int, position: int) -> None:
        """Go to a position in an epoch. Rows that were delivered but not reported will still be reported."""
        if epoch < 0 or not 0 <= position <= self.total:
            raise ValueError(f"epoch={epoch}, position={position}: not within {self.total} rows")
        self.epoch, self.position = epoch, position

    def follow(self, spec: OrderSpec) -> None:
        """Visit the rows of the present epoch in another order."""
        if spec != self.spec:
            self.spec, self._order = spec, None

    def upcoming(self, position: int, limit: int) -> list[Step]:
        """Return up to ``limit`` global steps from ``position`` on."""
        steps: list[Step] = []
        while len(steps) < limit and (rows := self.plan.next_rows(self.total - position, self.size)):
            steps.append(make_step(self.plan, position, rows, self.size, self.shares))
            position += rows
        return steps

    def delivered(self, step: Step, ticket_sum: int) -> None:
        """Count a step as delivered. ``ticket_sum`` is the sum over the counting rows that this rank actually received."""
        assert step.start == self.position, (step, self.position)
        self.position += step.rows
        self.rows_delivered += step.rows
        interval = self._interval
        interval.delivered_rows += step.rank_rows[self.rank]
        interval.delivered_tickets += ticket_sum
        interval.expected_rows += step.rows
        interval.expected_tickets += (2 * step.start + step.rows - 1) * step.rows // 2

    def report(self) -> Report:
        """Return this rank's report. Follow each by one ``confirm`` with all ranks' reports of the same commit."""
        interval, self._interval = self._interval, _Interval()
        here = (self.epoch, self.position)
        self._awaited.append(Report(*here, interval.expected_rows, interval.expected_tickets % _MODULUS))
        return Report(*here, interval.delivered_rows, interval.delivered_tickets % _MODULUS)

    def confirm(self, reports: Sequence[Report]) -> None:
        """Check all ranks' reports of one commit, in rank order. Raises DataError if they do not add up."""
        if not self._awaited:
            return
        expected = self._awaited.popleft()
        if len(reports) != self.size:
            raise final(
                DataError(
                    f"this loader has not entered the world of {len(reports)} ranks: make loaders above the elastic function, "
                    "give them to the State, and leave them there"
                )
            )
        for rank, report in enumerate(reports):
            if (report.epoch, report.position) != (expected.epoch, expected.position):
                # All ranks find the error, and the last to do so must not see a mere loss.
                raise final(
                    DataError(
                        f"rank {rank} is at epoch {report.epoch}, row {report.position}, rank {self.rank} at epoch "
                        f"{expected.epoch}, row {expected.position}: every rank must take every batch of its loader "
                        "before each commit"
                    )
                )
        delivered = sum(report.rows for report in reports)
        if delivered != expected.rows or sum(report.tickets for report in reports) % _MODULUS != expected.tickets:
            raise DataError(
                f"epoch {expected.epoch}, up to row {expected.position}: {delivered} rows delivered, {expected.rows} assigned"
                + (", but not the same ones" if delivered == expected.rows else "")
            )

    def pending(self) -> list[Pending]:
        """Return the row groups that still have rows to process, including partly processed ones."""
        done = self.order.processed(self.position, len(self.rows))
        open_groups = np.flatnonzero(done < self.rows)
        return [Pending(int(g), int(done[g]), int(self.rows[g])) for g in open_groups]

    def assignment(self, rank: int | None = None) -> list[Piece]:
        """Return the pieces that a rank has to read from the present position on, in the order in which its lanes need them.

        Ranks that share a lane all read it. Windows whose rows are all processed are left out.
        """
        rank = self.rank if rank is None else rank
        order, lanes = self.order, self.spec.lanes
        given = order.given(self.position)
        pieces = []
        for lane in range(rank * lanes // self.size, -(-(rank + 1) * lanes // self.size)):
            position, end = int(given[lane]), int(order.lane_rows[lane])
            if position < end:
                window = int(order.window_of(np.array([lane]), np.array([position]))[0])
                cut = int(order.cuts[lane])
                pieces += order.pieces(cut + order.window_bounds(lane, window)[0], cut + end)
        return pieces
