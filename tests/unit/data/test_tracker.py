from __future__ import annotations

import collections
import itertools
import os
import time

import msgspec
import numpy as np
import pytest
from data_worlds import BRIEF
from drawn_orders import plans, sizes, specs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spark_elastic.data.order import OrderSpec
from spark_elastic.data.plan import BatchPlan, draw
from spark_elastic.data.tracker import Report, RowGroupTracker
from spark_elastic.errors import DataError


class ElasticEpochs(RuleBasedStateMachine):
    """Ranks take steps, commit, die and join at random; every row must be processed once in every epoch."""

    @initialize(rows=sizes, spec=specs, plan=plans, size=st.integers(1, 8))
    def start(self, rows: np.ndarray, spec: OrderSpec, plan: BatchPlan, size: int) -> None:
        self.make = lambda: RowGroupTracker(rows, spec, plan)
        self.plan, self.rows = plan, rows
        self.committed = (0, 0)
        self.done: collections.Counter[tuple[int, int]] = collections.Counter()
        self.since: list[tuple[int, int]] = []
        self.seen: dict[tuple[int, int], list[int]] = {}
        self.ranks: list[RowGroupTracker] = []
        self.form(size, 0)

    @rule(size=st.integers(1, 8), survivors=st.integers(0, 8))
    def form(self, size: int, survivors: int) -> None:
        kept = self.ranks[: min(size, survivors)]
        self.ranks = kept + [self.make() for _ in range(size - len(kept))]
        self.since = []
        for rank, tracker in enumerate(self.ranks):
            tracker.seek(*self.committed)
            tracker.set_world(rank, size)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        first = self.ranks[0]
        for step in first.upcoming(first.position, count):
            rows: list[int] = []
            for rank, tracker in enumerate(self.ranks):
                drawn = draw(tracker.order, [step], rank)
                if step.rank_rows[rank]:
                    rows += (drawn.positions * tracker.spec.lanes + drawn.lanes).tolist()
                tracker.delivered(step, drawn.ticket_sums[0])
            self.since += [(first.epoch, row) for row in rows]
            if self.plan.overall is not None:
                assert sorted(self.seen.setdefault((first.epoch, step.start), sorted(rows))) == sorted(rows)

    @rule()
    def commit(self) -> None:
        reports = [tracker.report() for tracker in self.ranks]
        for tracker in self.ranks:
            tracker.confirm(reports)
        self.done.update(self.since)
        self.since = []
        self.committed = (self.ranks[0].epoch, self.ranks[0].position)

    @precondition(lambda self: self.ranks and (self.plan.overall or 0) >= len(self.ranks))
    @rule(data=st.data())
    def change_shares(self, data: st.DataObject) -> None:
        overall = self.plan.overall or 0
        inside = st.sets(st.integers(1, overall - 1), min_size=len(self.ranks) - 1, max_size=len(self.ranks) - 1)
        cuts = data.draw(inside) if len(self.ranks) > 1 else ()
        shares = tuple(stop - start for start, stop in itertools.pairwise([0, *sorted(cuts), overall]))
        for tracker in self.ranks:
            tracker.divide(shares)

    @precondition(lambda self: self.ranks and self.ranks[0].exhausted)
    @rule()
    def next_epoch(self) -> None:
        self.commit()
        epoch, position = self.committed
        expected = collections.Counter({(epoch, ticket): 1 for ticket in range(position)})
        assert collections.Counter({key: n for key, n in self.done.items() if key[0] == epoch}) == expected
        assert position == sum(self.rows) or self.plan.drop_last
        for tracker in self.ranks:
            tracker.seek(epoch + 1, 0)
        self.commit()

    @invariant()
    def pending_and_processed_rows_add_up(self) -> None:
        if getattr(self, "ranks", None):
            tracker = self.ranks[-1]
            left = sum(pending.rows - pending.processed for pending in tracker.pending())
            assert left == tracker.left


# `make schedules` plays thousands.
SCHEDULES = int(os.environ.get("SCHEDULES", "400"))
ElasticEpochs.TestCase.settings = settings(
    max_examples=SCHEDULES, stateful_step_count=30, derandomize=True, deadline=None
)
TestEveryRowOnceThroughAnyScheduleOfResets = ElasticEpochs.TestCase


def tracker(rows: list[int], plan: BatchPlan | None = None, lanes: int = 3) -> RowGroupTracker:
    return RowGroupTracker(np.array(rows), OrderSpec(0, True, lanes, 8, True), plan or BatchPlan(4, None))


def world(size: int, rows: list[int]) -> list[RowGroupTracker]:
    found = [tracker(rows) for _ in range(size)]
    for rank, member in enumerate(found):
        member.set_world(rank, size)
        (step,) = member.upcoming(0, 1)
        member.delivered(step, draw(member.order, [step], rank).ticket_sums[0])
    return found


def test_reports_that_add_up_are_confirmed() -> None:
    members = world(3, [10, 20, 1])
    reports = [member.report() for member in members]
    for member in members:
        member.confirm(reports)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, 0, -1, 0), "11 rows delivered, 12 assigned"),
        ((0, 0, 0, 1), "not the same ones"),
        ((0, 1, 0, 0), "rank 1 is at epoch 0, row 13"),
        ((1, 0, 0, 0), "rank 1 is at epoch 1, row 12"),
    ],
)
def test_a_report_that_does_not_add_up_is_an_error_on_every_rank(change: tuple[int, ...], message: str) -> None:
    members = world(3, [10, 20, 1])
    reports = [member.report() for member in members]
    reports[1] = Report(*(a + b for a, b in zip(reports[1], change, strict=True)))
    for member in (members[0], members[2]):
        with pytest.raises(DataError, match=message) as raised:
            member.confirm(reports)
        assert raised.value.is_final == ("every rank must take every batch" in str(raised.value))


def test_reports_confirmed_one_commit_later_are_compared_with_their_own_commit() -> None:
    members = world(2, [40])
    earlier = [member.report() for member in members]
    for rank, member in enumerate(members):
        (step,) = member.upcoming(member.position, 1)
        member.delivered(step, draw(member.order, [step], rank).ticket_sums[0])
    later = [member.report() for member in members]
    for member in members:
        member.confirm(earlier)
        member.confirm(later)


def test_a_reset_forgets_reports_that_will_never_be_confirmed() -> None:
    (member,) = world(1, [40])
    member.report()
    member.set_world(0, 1)
    member.confirm([member.report()])


@BRIEF
@given(rows=sizes, spec=specs, size=st.integers(1, 8), done=st.floats(0, 1))
def test_assignments_cover_what_is_left_and_skip_windows_that_are_done(
    rows: np.ndarray, spec: OrderSpec, size: int, done: float
) -> None:
    found = RowGroupTracker(rows, spec, BatchPlan(None, 10))
    found.set_world(0, size)
    found.seek(0, int(found.total * done))
    covered: set[tuple[int, int]] = set()
    for rank in range(size):
        for piece in found.assignment(rank):
            covered |= {(piece.group, row) for row in range(piece.start, piece.stop)}
    by_group = collections.Counter(group for group, _ in covered)
    for pending in found.pending():
        assert by_group[pending.group] >= pending.rows - pending.processed
    assert len(covered) - found.left <= spec.lanes * spec.window


def test_repartitioning_a_hundred_thousand_row_groups_takes_less_than_50_ms() -> None:
    rows = np.random.default_rng(0).integers(1, 50_000, 100_000)
    best = 1.0
    for _ in range(3):
        found = RowGroupTracker(rows, OrderSpec(0, True, 32, 1024, True), BatchPlan(256, None))
        found.seek(3, found.total // 3)
        start = time.thread_time()
        found.set_world(3, 7)
        found.upcoming(found.position, 16)
        draw(found.order, found.upcoming(found.position, 16), 3)
        best = min(best, time.thread_time() - start)
    assert best < 0.05


def test_the_state_of_a_billion_rows_fits_in_a_hundred_bytes() -> None:
    found = tracker([10**7] * 100)
    found.seek(5, 123_456_789)
    found.set_world(0, 3)
    assert len(msgspec.msgpack.encode(found.report())) < 100
