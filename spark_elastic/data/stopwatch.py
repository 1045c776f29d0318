"""Stopwatch: how long this rank needs for its share of a step, without the time in which it waits for other ranks, and with it.

A step is timed from where its batch is asked for, so that reading counts, to where its gradients are computed and ranks begin to
wait for each other; its period ends where the next batch is asked for.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

# How many steps, and how many seconds, have to be timed before the median is meaningful, because single steps differ by chance.
LEAST_STEPS = 8
LEAST_SECONDS = 1.0
# As long as some rank has none to tell, steps are kept, but no more than these, the newest.
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
        """Leave out the step under way, which is not like others."""
        self._started_at: float | None = None
        self._stopped_at: float | None = None
        _running.discard(self)

    def start(self) -> None:
        """Note that a batch is asked for. The step before it ends here, and counts if it has had gradients."""
        now = self._clock()
        if self._started_at is not None:
            self._periods.append(now - self._started_at)
            if self._stopped_at is not None:
                self._steps.append(self._stopped_at - self._started_at)
        self._started_at, self._stopped_at = now, None
        _running.add(self)

    def stop(self) -> None:
        """Note that gradients are computed. In a step that computes gradients several times the last time counts."""
        self._stopped_at = self._clock()

    def microseconds(self) -> int:
        """Return the median of the steps since ``clear``, at least 1; 0 as long as there are too few."""
        if not self._are_enough(self._steps):
            return 0
        return max(1, round(statistics.median(self._steps) * 1e6))

    def period(self) -> int:
        """Return the mean of the microseconds from one batch to the next since ``clear``, at least 1; 0 if there are too few.

        It includes what ranks wait for each other, and steps without an optimizer's step, of which a median may know nothing.
        """
        if not self._are_enough(self._periods):
            return 0
        return max(1, round(statistics.fmean(self._periods) * 1e6))

    def _are_enough(self, timed: Sequence[float]) -> bool:
        return len(timed) >= LEAST_STEPS and self._clock() - self._cleared_at >= LEAST_SECONDS


def note_gradients() -> None:
    """Note for the loaders that are timed in this process that gradients are computed."""
    for stopwatch in _running:
        stopwatch.stop()
