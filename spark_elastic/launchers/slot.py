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

    def register(self) -> None:
        """Note that the slot's task has registered with the driver, so that its next start need not wait."""
        self.failures = 0
        self.registered = True

    def failed(self, sentence: str, reason: str, listener: SlotListener) -> None:
        """Note why the slot's task has ended. It starts again after a pause that grows with each failure in a row.

        If the task had not registered, ``on_given_up`` is called. ``sentence`` is logged with the slot's number, reason and
        pause.
        """
        self.failures += 1
        pause = pause_after(self.failures)
        self.start_at = max(self.start_at, time.monotonic() + pause)
        if not self.registered:
            listener.on_given_up(self.number, reason)
        logger.log(logging.INFO if self.registered else logging.WARNING, sentence, self.number, reason, pause)
        self.registered = False
