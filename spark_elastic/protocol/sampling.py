"""How often samples of a worker are recorded, so that the event log stays small in large and long jobs."""

from __future__ import annotations

# For all workers together. A worker gives a sample every five seconds, so this matters from about twenty workers on.
SAMPLES_A_SECOND = 4
# About this many samples of a worker are recorded while it becomes e times as old. This matters once it is eight minutes old.
SAMPLES_AN_AGE = 100


def pause(workers: int, age: float) -> float:
    """Return how many seconds have to pass between two recorded samples of a worker that is ``age`` seconds old."""
    return max(workers / SAMPLES_A_SECOND, age / SAMPLES_AN_AGE)
