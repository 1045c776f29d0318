"""Records: their kinds, and the sentences in which they tell of slow workers and of other sizes."""

from __future__ import annotations

from typing import get_args

import pytest

from spark_elastic.protocol.records import DRIVER_RECORDS, DriverRecord, WorkerSlow, WorkerTooSlow, WorldSized
from spark_elastic.protocol.reports import REPORTS


def test_every_record_has_a_kind_and_none_is_that_of_a_report() -> None:
    assert len(DRIVER_RECORDS) == len(get_args(DriverRecord))
    assert not DRIVER_RECORDS.keys() & REPORTS.keys()


def test_a_slow_worker_is_named_with_what_helps() -> None:
    told = WorkerSlow(4, 1, "west", 3.04).describe()
    assert told.startswith("rank 1 (worker 4) on west is slow: a row takes it 3.0 times as long as the median")
    assert told.endswith('balance="auto" gives it fewer rows')


@pytest.mark.parametrize(
    ("seconds", "follows"),
    [
        (60.0, "it is replaced, and its executor gets no worker for 60 s"),
        (None, "it stays, because fewer than min_np workers would be left without it"),
    ],
)
def test_a_worker_that_is_too_slow_is_named_with_what_follows(seconds: float | None, follows: str) -> None:
    told = WorkerTooSlow(4, 1, "west", 12.5, seconds).describe()
    assert told.startswith("rank 1 (worker 4) on west is too slow")
    assert follows in told


@pytest.mark.parametrize(
    ("size", "is_tried", "told"),
    [
        (2, True, "2 of 4 workers are tried, because workers spend much of a step on waiting: "),
        (2, False, "2 of 4 workers train from here on, because more are not faster: "),
        (4, False, "all 4 workers train again, because fewer are not faster: "),
    ],
)
def test_how_many_workers_train_is_told_with_what_was_measured(size: int, is_tried: bool, told: str) -> None:
    sized = WorldSized(size, is_tried, [4, 2], [1000.0, 2500.4]).describe()
    assert sized.startswith(f"{told}4 trained 1,000 rows/s, 2 trained 2,500 rows/s")
