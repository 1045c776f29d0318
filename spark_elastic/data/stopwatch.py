"""Stopwatch: times this rank's share of a step, both without and with the time that it waits for other ranks.

A step is timed from the request for its batch, so that reading counts, until its gradients are computed and ranks begin to wait
for each other. Its period ends with the request for the next batch.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

# How many steps and seconds have to be timed before the median is meaningful, because single steps vary by chance.
LEAST_STEPS = 8
LEAST_SECONDS = 1.0
# While some rank has too few steps, the others keep theirs, but at most this many, the newest.
MOST_STEPS = 1000

# The stopwatches that are timing a step at present.
_running: set[Stopwatch] = set()


class Stopwatch:
    """Times the steps of one loader. Used by the user's thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget all timed steps, because the steps from now on are different."""
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._periods: deque[float] = deque(maxlen=MOST_STEPS)
        self._cleared_at = self._clock()
        self.drop()

    def drop(self) -> None:
        """Discard the current step, because it is not representative."""
        self._started_at: float | None = None
        self._stopped_at: float | None = None
        _running.discard(self)

    def start(self) -> None:
        """Note that a batch is requested. The previous step ends here, and counts if it had gradients."""
        now = self._clock()
        if self._started_at is not None:
            self._periods.append(now - self._started_at)
            if self._stopped_at is not None:
                self._steps.append(self._stopped_at - self._started_at)
        self._started_at, self._stopped_at = now, None
        _running.add(self)

    def stop(self) -> None:
        """Note that gradients are computed. If a step computes gradients several times, the last time counts."""
        self._stopped_at = self._clock()

    def microseconds(self) -> int:
        """Return the median of the steps since ``clear``, at least 1; 0 while there are too few."""
        if not self._are_enough(self._steps):
            return 0
        return max(1, round(statistics.median(self._steps) * 1e6))

    def period(self) -> int:
        """Return the mean of the microseconds from one batch to the next since ``clear``, at least 1; 0 if there are too few.

        It includes the time that ranks wait for each other, and steps without an optimizer's step, which a median might ignore.
        """
        if not self._are_enough(self._periods):
            return 0
        return max(1, round(statistics.fmean(self._periods) * 1e6))

    def _are_enough(self, timed: Sequence[float]) -> bool:
        return len(timed) >= LEAST_STEPS and self._clock() - self._cleared_at >= LEAST_SECONDS


def note_gradients() -> None:
    """Tell all running stopwatches of this process that gradients are computed."""
    for stopwatch in _running:
        stopwatch.stop()
