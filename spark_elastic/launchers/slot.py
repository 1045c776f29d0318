"""What every launcher keeps about a slot: whether its task has registered, and when to start it again."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from spark_elastic.launchers.base import SlotListener
from spark_elastic.launchers.defaults import pause_after

logger = logging.getLogger("spark_elastic")


@dataclass(slots=True)
class Slot:
    """One slot. Launchers add what they need to start its task."""

    number: int
    start_at: float = 0.0
    failures: int = 0
    registered: bool = False
    # Whether the slot's task is connected to the driver. If it is when the job ends, it runs, and ends by itself.
    is_connected: bool = False
    # Whether a task of this slot, the present one or an earlier one, has reached the driver.
    was_known: bool = False

    def register(self) -> None:
        """Note that the slot's task has registered with the driver, so that its next start need not wait."""
        self.failures = 0
        self.registered = self.was_known = self.is_connected = True

    def ended(self, sentence: str, error: str, listener: SlotListener, unheard: str = "") -> None:
        """Note that the slot's task has ended. It starts again after a pause that grows with each failure in a row.

        If the task had not registered, ``on_given_up`` is called. That is different if it ended without an error, and a task of
        this slot has reached the driver before: then the driver listens no longer, and the job is about to end. ``sentence`` is
        logged with the slot's number, reason and pause. unheard: the reason if there was no error and no task has ever reached
        the driver.
        """
        self.failures += 1
        pause = pause_after(self.failures)
        self.start_at = max(self.start_at, time.monotonic() + pause)
        is_ordinary = self.registered or (self.was_known and not error)
        reason = error or ("its task has ended" if self.was_known else unheard)
        if not is_ordinary:
            listener.on_given_up(self.number, reason)
        logger.log(logging.INFO if is_ordinary else logging.WARNING, sentence, self.number, reason, pause)
        self.registered = self.is_connected = False
