"""RecentHistory: what has recently happened to a job, for the message of an error in the machine itself."""

from __future__ import annotations

from collections import deque
from itertools import count
from operator import itemgetter

from spark_elastic.driver import events as ev

# Events that occur all the time and say nothing new.
ROUTINE = frozenset({ev.TaskHeard, ev.WorkerHeard, ev.WorkerSeen, ev.ResultFlowed, ev.Tick})
EVENTS_KEPT = 64
CHANGES_KEPT = 32


class MachineFault(AssertionError):
    """The driver's machine has made a mistake: a bug in this package. The message ends with the recent history."""


class RecentHistory:
    """Keeps the last events and, separately, the last changes of the world's phase, so that many events cannot push these out.

    Noting an event costs next to nothing: events are put into words only for an error.
    """

    def __init__(self) -> None:
        # Each entry has a number, by which events and changes are merged, a time, and a description.
        self._events: deque[tuple[int, float, object]] = deque(maxlen=EVENTS_KEPT)
        self._changes: deque[tuple[int, float, object]] = deque(maxlen=CHANGES_KEPT)
        self._numbers = count()

    def happened(self, event: ev.Event, now: float) -> None:
        """Note an event, unless it is routine."""
        if type(event) not in ROUTINE:
            self._events.append((next(self._numbers), now, event))

    def changed(self, what: str, now: float) -> None:
        """Note a change of the world's phase."""
        self._changes.append((next(self._numbers), now, what))

    def fault(self, error: Exception) -> MachineFault:
        """Return the error to raise from ``error``; it lists events and changes in the order in which they were noted."""
        noted = sorted((*self._events, *self._changes), key=itemgetter(0))
        lines = "".join(f"\n  {time:.3f} {what}" for _, time, what in noted)
        return MachineFault(f"{type(error).__name__}: {error}; what happened before:{lines}")
