"""MachineClock: the time by which the machine judges others. It stands still while the driver itself is paused."""

from __future__ import annotations

import math

TICK_SECONDS = 1.0
# If the machine itself has handled no event for longer than this, the driver was paused, and not everybody else.
PAUSE_SECONDS = 3.0


class MachineClock:
    """Learns driver time (monotonic seconds) with every event; ``now`` is the time of the last event less all pauses."""

    def __init__(self, now: float) -> None:
        self.driver_time = self.now = now
        self._paused = 0.0

    def advance(self, now: float) -> float | None:
        """Take note of the driver time of an event. Return how long the driver was paused before that; None for no pause."""
        gap = now - self.driver_time
        is_pause = gap > PAUSE_SECONDS
        if is_pause:
            self._paused += gap - TICK_SECONDS
        self.driver_time, self.now = now, now - self._paused
        return gap if is_pause else None

    def to_driver_time(self, time: float) -> float:
        """Return the driver time at which the machine's time is ``time``, if the driver is not paused again.

        A future time stays later than the last event: if it were rounded to that moment, the machine would be asked again
        immediately, for ever.
        """
        due = time + self._paused
        return max(due, math.nextafter(self.driver_time, math.inf)) if time > self.now else due

    def from_driver_time(self, time: float) -> float:
        """Return the machine's time at a driver time, if the driver is not paused again."""
        return time - self._paused
