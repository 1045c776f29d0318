"""The process that a run on this machine leaves for the next run: it has imported torch, and slots are forked from it.

The process has only done imports, so it holds nothing of a job: ticket and key go to the slots, which end with their job.
"""

from __future__ import annotations

import atexit
import os
import threading

from spark_elastic.launchers.slot_process import SlotParent


class KeptParent:
    """Holds at most one process, which forks nothing while it is held. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parent: SlotParent | None = None

    def take(self, cpus: int) -> SlotParent:
        """Return the held process if a new one would be no different; else end it and start a new one. Raises ``OSError``."""
        parent = self._exchange(None)
        if parent is not None and parent.fits(cpus):
            return parent
        _end(parent)
        return SlotParent(cpus)

    def keep(self, parent: SlotParent) -> None:
        """Hold a process without slots, in place of any that is already held."""
        _end(self._exchange(parent))

    def end(self) -> None:
        """End the process and wait for its end."""
        _end(self._exchange(None))

    def renew_lock(self) -> None:
        """In a forked child, make a lock that no thread holds. The child cannot take the process, which is not its own child."""
        self._lock = threading.Lock()

    def _exchange(self, parent: SlotParent | None) -> SlotParent | None:
        with self._lock:
            held, self._parent = self._parent, parent
        return held


def _end(parent: SlotParent | None) -> None:
    if parent is not None:
        parent.end()


KEPT = KeptParent()
atexit.register(KEPT.end)
os.register_at_fork(after_in_child=KEPT.renew_lock)
