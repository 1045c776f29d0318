"""Stopwatch: times this rank's share of a step, both without and with the time that it waits for other ranks.

A step lasts from the request for its batch to the request for the next one. So reading, the optimizer and the commit count:
others wait for all of it at the next gradients. Steps without gradients do not count. What follows the gradients, which takes as
long with fewer rows, is also timed by itself.
"""

from __future__ import annotations

import statistics
import threading
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
        self._thread = 0
        self.clear()

    def clear(self) -> None:
        """Forget all timed steps, because the steps from now on are different."""
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._fixed: deque[float] = deque(maxlen=MOST_STEPS)
        self._periods: deque[float] = deque(maxlen=MOST_STEPS)
        self._cleared_at = self._clock()
        self.drop()

    def drop(self) -> None:
        """Discard the current step, because it is not representative."""
        self._started_at: float | None = None
        # The seconds of the step so far in which this rank has computed its gradients; None if it has none yet.
        self._until_gradients: float | None = None
        self._waited, self._waits_since = 0.0, self._clock()
        _running.discard(self)

    def start(self) -> None:
        """Note that a batch is requested. The previous step ends here, and counts if it had gradients."""
        now = self._clock()
        if self._started_at is not None:
            self._periods.append(now - self._started_at)
            if self._until_gradients is not None:
                self._steps.append(now - self._started_at - self._waited)
                self._fixed.append(self._steps[-1] - self._until_gradients)
        self._started_at, self._until_gradients, self._waited = now, None, 0.0
        self._thread = threading.get_ident()
        _running.add(self)

    def note_gradients(self) -> None:
        """Note that gradients are computed. If a step computes gradients several times, the last time counts."""
        if self._started_at is not None:
            self._until_gradients = self._clock() - self._started_at - self._waited

    def pause(self) -> None:
        """Note that a collective is waited for. What another thread than that of the loop waits for does not count."""
        if threading.get_ident() == self._thread:
            self._waits_since = self._clock()

    def resume(self) -> None:
        """Note the end of what ``pause`` has noted."""
        if threading.get_ident() == self._thread:
            self._waited += self._clock() - self._waits_since

    def microseconds(self) -> int:
        """Return the median of the steps since ``clear``, at least 1; 0 while there are too few."""
        if not self._are_enough(self._steps):
            return 0
        return max(1, round(statistics.median(self._steps) * 1e6))

    def fixed(self) -> int:
        """Return the median of what follows the gradients in these steps, in microseconds; 0 while there are too few."""
        return round(statistics.median(self._fixed) * 1e6) if self._are_enough(self._fixed) else 0

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
    for stopwatch in tuple(_running):
        stopwatch.note_gradients()


def note_waiting() -> None:
    """Tell them that this thread waits for other ranks, until ``note_waited``."""
    for stopwatch in tuple(_running):
        stopwatch.pause()


def note_waited() -> None:
    """Tell them that this thread goes on. Every call follows one of ``note_waiting``."""
    for stopwatch in tuple(_running):
        stopwatch.resume()
