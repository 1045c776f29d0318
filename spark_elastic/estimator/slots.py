"""Makes concurrent fits of one process take turns if the cluster lacks slots for all of them at once.

Each fit waits in line until other fits leave ``minNp`` slots free for it, and then requests at most the free slots from Spark.
So two fits never each hold a part of what both need, and a waiting fit does not run into ``startTimeout``. Fits of other
processes are not visible here; ``spark_elastic.run`` returns its slots if it cannot start.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SlotLedger:
    """Records how many slots each fit holds. Fits are served in order of arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[object, int] = {}
        self._line: list[object] = []

    @contextmanager
    def slots(self, least: int, most: int, total: int) -> Iterator[int]:
        """Wait for ``least`` slots of ``total``, and yield how many to request: ``most`` if there is no other fit.

        A fit that wants more slots than exist waits until no other fit is left, not until the cluster grows.
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
