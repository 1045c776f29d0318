"""The faults that ``spark_elastic.testing`` injects into runs, and which of them have struck."""

from __future__ import annotations

import warnings
from contextvars import ContextVar

from spark_elastic.protocol.fault_points import Fault
from spark_elastic.protocol.records import Entry, EventsDropped, FaultInjected

# The faults for the runs that this thread starts.
active: ContextVar[tuple[Fault, ...]] = ContextVar("spark_elastic_faults", default=())


def active_plan() -> tuple[Fault, ...]:
    """Return the faults to inject into a run that starts here."""
    return active.get()


class Strikes:
    """Records which of the active faults have struck in a run."""

    def __init__(self) -> None:
        self._missing = {entry.number: entry for entry in active_plan()}

    def see(self, entry: Entry) -> None:
        """Note an entry of the job's event log."""
        if isinstance(entry.record, FaultInjected):
            self._missing.pop(entry.record.fault, None)
        elif isinstance(entry.record, EventsDropped):
            self._missing.clear()  # the dropped events may have been these faults

    def warn_of_missing(self) -> None:
        """Warn the caller of ``run`` about faults that have not struck: a test with such a fault has tested nothing."""
        if self._missing:
            told = ", ".join(map(str, self._missing.values()))
            warnings.warn(
                f"injected, but never struck: {told}. Did the job reach that step, with that rank, in that generation?",
                stacklevel=3,
            )
