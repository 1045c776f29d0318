"""Timing a rank's steps without the time in which it waits for others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spark_elastic.data.stopwatch import LEAST_STEPS, Stopwatch, note_gradients, note_waited, note_waiting


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stopwatch(clock: Clock) -> Iterator[Stopwatch]:
    made = Stopwatch(clock)
    yield made
    made.drop()


def step(stopwatch: Stopwatch, clock: Clock, seconds: float, waiting: float = 0.0) -> None:
    stopwatch.start()
    clock.now += seconds
    note_gradients()
    wait(clock, waiting)


def wait(clock: Clock, seconds: float) -> None:
    note_waiting()
    clock.now += seconds
    note_waited()


def test_a_steps_time_has_the_optimizer_and_the_commit_in_it_and_no_waiting_for_others(
    stopwatch: Stopwatch, clock: Clock
) -> None:
    for _ in range(LEAST_STEPS + 1):
        step(stopwatch, clock, 0.02, waiting=0.5)
        clock.now += 0.003
    assert stopwatch.microseconds() == 23_000
    assert stopwatch.fixed() == 3_000


def test_what_is_waited_for_in_collectives_within_a_step_does_not_count(stopwatch: Stopwatch, clock: Clock) -> None:
    """Such as the sum of the rows that all ranks have set by hand, which the first gradient waits for."""
    for _ in range(LEAST_STEPS + 1):
        stopwatch.start()
        clock.now += 0.02
        wait(clock, 0.7)
        clock.now += 0.01
        note_gradients()
        wait(clock, 0.4)
    assert stopwatch.microseconds() == 30_000
    assert stopwatch.period() == 1_130_000


def test_what_another_thread_waits_for_counts_as_the_loops_own_time(stopwatch: Stopwatch, clock: Clock) -> None:
    for _ in range(LEAST_STEPS + 1):
        stopwatch.start()
        thread = threading.Thread(target=wait, args=(clock, 0.5))
        thread.start()
        thread.join()
        note_gradients()
    assert stopwatch.microseconds() == 500_000


def test_the_last_gradients_of_a_step_count(stopwatch: Stopwatch, clock: Clock) -> None:
    for _ in range(LEAST_STEPS + 1):
        step(stopwatch, clock, 1.0)
        clock.now += 1.0
        note_gradients()
        clock.now += 0.25
    assert stopwatch.microseconds() == 2_250_000
    assert stopwatch.fixed() == 250_000


def test_a_few_steps_that_took_long_by_chance_do_not_count(stopwatch: Stopwatch, clock: Clock) -> None:
    for number in range(2 * LEAST_STEPS):
        step(stopwatch, clock, 30.0 if number % 5 == 0 else 0.5)
    assert stopwatch.microseconds() == 500_000


def test_a_period_is_the_mean_from_one_batch_to_the_next(stopwatch: Stopwatch, clock: Clock) -> None:
    for _ in range(LEAST_STEPS):
        step(stopwatch, clock, 0.02, waiting=0.48)
    assert stopwatch.period() == 0, "the last step has not ended"
    step(stopwatch, clock, 0.02, waiting=100.0)
    assert stopwatch.period() == 500_000
    stopwatch.drop()
    step(stopwatch, clock, 0.02, waiting=1.38)
    stopwatch.start()
    assert stopwatch.period() == 600_000
    stopwatch.clear()
    assert stopwatch.period() == 0


def test_nothing_is_known_before_some_steps_and_some_time(stopwatch: Stopwatch, clock: Clock) -> None:
    for _ in range(LEAST_STEPS):
        step(stopwatch, clock, 10.0)
    assert stopwatch.microseconds() == 0, "the last step has not ended"
    step(stopwatch, clock, 10.0)
    assert stopwatch.microseconds() == 10_000_000
    stopwatch.clear()
    assert stopwatch.microseconds() == 0
    for _ in range(20 * LEAST_STEPS):
        step(stopwatch, clock, 0.001)
    assert stopwatch.microseconds() == 0, "a fifth of a second says little"


def test_a_step_that_is_dropped_or_has_no_gradients_does_not_count(stopwatch: Stopwatch, clock: Clock) -> None:
    for _ in range(LEAST_STEPS + 1):
        step(stopwatch, clock, 1.0)
        stopwatch.start()
        clock.now += 100.0  # evaluated only
        step(stopwatch, clock, 50.0)
        stopwatch.drop()
    step(stopwatch, clock, 1.0)
    assert stopwatch.microseconds() == 1_000_000
