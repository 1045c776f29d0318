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
    """Counts how often the active faults have struck in a run."""

    def __init__(self) -> None:
        self._plan = {entry.number: entry for entry in active_plan()}
        self._struck = dict.fromkeys(self._plan, 0)

    def see(self, entry: Entry) -> None:
        """Note an entry of the job's event log."""
        if isinstance(entry.record, FaultInjected) and entry.record.fault in self._struck:
            self._struck[entry.record.fault] += 1
        elif isinstance(entry.record, EventsDropped):
            self._struck.clear()  # the dropped events may have been these faults

    def warn_of_missing(self) -> None:
        """Warn the caller of ``run`` about faults that have not struck, or less often than they were to."""
        never = [str(self._plan[number]) for number, count in self._struck.items() if not count]
        if never:
            warnings.warn(
                f"injected, but never struck: {', '.join(never)}. Did the job reach that step, with that rank, in that "
                "generation?",
                stacklevel=3,
            )
        for number, count in self._struck.items():
            if 0 < count < (fault := self._plan[number]).times:
                warnings.warn(
                    f"injected to strike {fault.times} times, but struck {count}: {fault}. A step that survivors keep does not "
                    "come again",
                    stacklevel=3,
                )
