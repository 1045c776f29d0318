"""Worker: which part of a commit it holds, and the phases that it enters."""

from __future__ import annotations

from itertools import product

import pytest

from spark_elastic.driver.hosts import Place
from spark_elastic.driver.phases import WORKER, IllegalTransition, WorkerChange, WorkerPhase
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import CommitId, Slices

LAST, BEFORE = CommitId(2, 5), CommitId(2, 4)


def worker(commit: CommitId | None = None, slices: tuple[Slices, ...] | None = None) -> Worker:
    return Worker(4, 1, "a", Place("a", 1), started_at=0.0, heard=0.0, commit=commit, slices=slices)


def test_who_keeps_commits_whole_holds_the_whole_of_the_last_one_and_of_no_other() -> None:
    assert worker(LAST).slices_of(LAST) == Slices(LAST, (0,), 1)
    assert worker(LAST).slices_of(BEFORE) is None
    assert worker().slices_of(LAST) is None


def test_who_keeps_slices_holds_those_of_the_commit_that_is_asked_for() -> None:
    last, before = Slices(LAST, (1, 2), 3), Slices(BEFORE, (0, 1), 3)
    assert worker(LAST, (last, before)).slices_of(BEFORE) == before
    assert worker(LAST, (last, before)).slices_of(LAST) == last
    assert worker(LAST, (before,)).slices_of(LAST) is None


def test_every_change_leads_where_the_table_says_and_any_other_leaves_the_phase_and_raises() -> None:
    for phase, change in product(WorkerPhase, WorkerChange):
        changing = worker()
        changing.phase = phase
        if (phase, change) in WORKER:
            changing.enter(change)
            assert changing.phase is WORKER[phase, change]
        else:
            with pytest.raises(IllegalTransition, match=f"worker 4 is {phase.name}, where {change.name}"):
                changing.enter(change)
            assert changing.phase is phase
