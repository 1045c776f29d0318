"""How often what a worker uses is recorded, so that the event log stays small in large and in long jobs."""

from __future__ import annotations

# Of all workers together. A worker gives a sample every five seconds, so this matters from about twenty workers on.
SAMPLES_A_SECOND = 4
# While a worker becomes e times as old, about so many of its samples are recorded. This matters once it is eight minutes old.
SAMPLES_AN_AGE = 100


def pause(workers: int, age: float) -> float:
    """Return how many seconds have to pass between two recorded samples of a worker that is ``age`` seconds old."""
    return max(workers / SAMPLES_A_SECOND, age / SAMPLES_AN_AGE)
