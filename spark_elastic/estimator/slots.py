"""Lets concurrent fits of one process take turns where the cluster has not enough slots for all of them at once.

Each fit waits in line until its ``minNp`` slots are free of other fits, and then asks Spark for no more than are. So no two
fits hold parts of what both need, and a fit that waits does not run into ``startTimeout``. Fits of other processes are not
seen here; ``spark_elastic.run`` gives slots back where it cannot start.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SlotLedger:
    """Who holds how many slots; first come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[object, int] = {}
        self._line: list[object] = []

    @contextmanager
    def slots(self, least: int, most: int, total: int) -> Iterator[int]:
        """Wait for ``least`` slots of ``total`` and yield how many to ask for, ``most`` where nobody else is there.

        Who wants more than there are waits for nobody to be left, not for the cluster to grow.
        """
        me = object()
        with self._changed:
            self._line.append(me)
            try:
                self._changed.wait_for(lambda: self._line[0] is me and (not self._held or self._free(total) >= least))
                granted = min(most, self._free(total)) if self._held else most
                self._held[me] = min(granted, total)
            finally:
                self._line.remove(me)
                self._changed.notify_all()
        try:
            yield granted
        finally:
            with self._changed:
                del self._held[me]
                self._changed.notify_all()

    def _free(self, total: int) -> int:
        return total - sum(self._held.values())


ledger = SlotLedger()
