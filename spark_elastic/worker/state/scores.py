"""Scores: finds the commit that a reported metric belongs to."""

from __future__ import annotations

import logging

logger = logging.getLogger("spark_elastic")


class Scores:
    """Follows the commits and reports of one generation, by the number of optimizer steps that precede each.

    A report is about the present weights. They are those of the last commit if no optimizer has stepped since, else those of
    the next commit, unless an optimizer steps before it.
    """

    def __init__(self) -> None:
        self._committed_at = 0
        self._waiting: tuple[float, int] | None = None

    def reported(self, value: float, steps: int) -> bool:
        """Note a report. Return whether it is about the last commit."""
        is_committed = steps == self._committed_at
        self._waiting = None if is_committed else (value, steps)
        return is_committed

    def committed(self, steps: int) -> float | None:
        """Note a commit. Return the value that was reported for it, if any."""
        self._committed_at = steps
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        value, reported_at = waiting
        if steps != reported_at:
            logger.warning(
                "a metric was reported between two commits, and an optimizer has stepped since: no checkpoint has the weights "
                "that it is about. Call state.commit() before the next step"
            )
            return None
        return value
