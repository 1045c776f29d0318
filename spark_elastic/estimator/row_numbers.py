"""RowCount: names the rows of a Spark task in errors."""

from __future__ import annotations

from collections.abc import Callable

from pyspark import TaskContext


class RowCount:
    """Numbers the rows of a Spark task in order; outside a task, the rows of each batch."""

    def __init__(self) -> None:
        self._task: int | None = None
        self._rows = 0

    def next(self, rows: int) -> Callable[[int], str]:
        """Count the next rows, and return a function that names each of them by its position."""
        context = TaskContext.get()
        if context is None:
            return lambda place: f"row {place}"
        if self._task != context.taskAttemptId():
            self._task, self._rows = context.taskAttemptId(), 0
        start, partition = self._rows, context.partitionId()
        self._rows += rows
        return lambda place: f"row {start + place} of partition {partition}"
