"""How many samples of workers are recorded, in small, large and long jobs, and that no line is lost by that."""

from __future__ import annotations

import pytest

from spark_elastic.driver.samples import WorkerSamples
from spark_elastic.protocol import messages as m
from spark_elastic.protocol import records

HOUR = 3600.0
EVERY = 5.0  # seconds, as tasks send them


def recorded(workers: int, seconds: float) -> list[float]:
    """The times at which samples of one worker are recorded, of those that its task sends in so many seconds."""
    samples = WorkerSamples()
    times = [EVERY * number for number in range(int(seconds / EVERY))]
    return [time for time in times if samples.take(m.WorkerSampled(0, 1.0, 2), workers, time) is not None]


@pytest.mark.parametrize("workers", [1, 8, 20])
def test_of_a_small_young_job_all_samples_are_recorded(workers: int) -> None:
    assert len(recorded(workers, 500)) == 100


@pytest.mark.parametrize("workers", [40, 100, 1000])
def test_of_a_large_job_at_most_four_samples_a_second_are_recorded(workers: int) -> None:
    found = recorded(workers, HOUR)
    assert workers * len(found) <= 4 * HOUR + workers
    assert len(found) > 10


def test_of_a_long_job_ever_fewer_samples_are_recorded() -> None:
    first, second, third = (recorded(1, 24 * HOUR * days) for days in (1, 2, 4))
    assert len(first) < 700
    assert len(second) - len(first) < 100
    assert len(third) - len(second) < 100


def test_lines_of_samples_that_are_passed_over_come_with_the_next_and_once() -> None:
    samples = WorkerSamples()
    told = [
        samples.take(m.WorkerSampled(7, time, 2, lines), 1000, time)
        for time, lines in [(0.0, ("a",)), (5.0, ("a", "b")), (10.0, ()), (250.0, ()), (500.0, ())]
    ]
    assert told == [
        records.WorkerSampled(7, 0.0, 2, ["a"]),
        None,
        None,
        records.WorkerSampled(7, 250.0, 2, ["a", "b"]),
        records.WorkerSampled(7, 500.0, 2, None),
    ]


def test_the_next_worker_of_a_task_begins_anew_without_the_lines_of_the_last() -> None:
    samples = WorkerSamples()
    samples.take(m.WorkerSampled(1, 1.0, 2), 1000, 0.0)
    assert samples.take(m.WorkerSampled(1, 1.0, 2, ("last words",)), 1000, 5.0) is None
    assert samples.take(m.WorkerSampled(2, 1.0, 2), 1000, 10.0) == records.WorkerSampled(2, 1.0, 2, None)
