"""A copy of a commit that is made when a test says so, as a GPU makes it later than the host goes on."""

from __future__ import annotations

from spark_elastic.worker.state.pending_copy import PendingCopy


class Copy(PendingCopy):
    """Made when somebody waits for it, or ``make`` is called."""

    def __init__(self) -> None:
        self._is_made = False

    def make(self) -> None:
        self._is_made = True

    def is_made(self) -> bool:
        return self._is_made

    wait = make
