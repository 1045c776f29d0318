"""MachineClock: the time by which the machine judges others. The clock stands still while the driver itself is paused."""

from __future__ import annotations

import math

TICK_SECONDS = 1.0
# If the machine has handled no event for longer than this, the driver was paused, and not everybody else.
PAUSE_SECONDS = 3.0


class MachineClock:
    """Learns driver time (monotonic seconds) with every event; ``now`` is the time of the last event less all pauses."""

    def __init__(self, now: float) -> None:
        self.driver_time = self.now = now
        self._paused = 0.0

    def advance(self, now: float) -> float | None:
        """Note the driver time of an event. Return how long the driver was paused before it; None if it was not paused."""
        gap = now - self.driver_time
        is_pause = gap > PAUSE_SECONDS
        if is_pause:
            self._paused += gap - TICK_SECONDS
        self.driver_time, self.now = now, now - self._paused
        return gap if is_pause else None

    def to_driver_time(self, time: float) -> float:
        """Return the driver time at which the machine's time is ``time``, if the driver is not paused again.

        A future time stays later than the last event: if it were rounded down to that event's time, the machine would be asked
        again immediately, forever.
        """
        due = time + self._paused
        return max(due, math.nextafter(self.driver_time, math.inf)) if time > self.now else due

    def from_driver_time(self, time: float) -> float:
        """Return the machine's time at a driver time, if the driver is not paused again."""
        return time - self._paused
