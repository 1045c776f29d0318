"""What Spark runs in an executor for a slot. It is pickled with the ticket, and with no user code."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.launchers.gpus import gpu_at
from spark_elastic.protocol.ticket import Ticket

if TYPE_CHECKING:
    import pyarrow as pa


class SlotConfigurationError(ValueError):
    """Spark gives tasks something that a worker cannot use. Another try would not help."""


class RowsTask:
    """A slot's task for ``RDD.mapPartitions``. It returns its slot's number if it has reached the driver, else nothing."""

    def __init__(self, ticket: Ticket, slot: int) -> None:
        self._ticket = ticket
        self._slot = slot

    def __call__(self, rows: Iterable[object]) -> list[int]:
        """Run the task to its end."""
        return [self._slot] if _run(self._ticket, self._slot, rows) else []


class ArrowTask:
    """A slot's task for ``DataFrame.mapInArrow``, all that a session of Spark Connect offers.

    It returns what ``RowsTask`` does.
    """

    def __init__(self, ticket: Ticket, slot: int) -> None:
        self._ticket = ticket
        self._slot = slot

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the task to its end."""
        if _run(self._ticket, self._slot, batches):
            import pyarrow as pa

            yield pa.RecordBatch.from_pydict({"slot": pa.array([self._slot], pa.int64())})


def _run(ticket: Ticket, slot: int, given: Iterable[object]) -> bool:
    from pyspark import TaskContext

    from spark_elastic.task.importer import ask_importer
    from spark_elastic.task.service import REAL_RUNTIME, TaskPlace, run_task
    from spark_elastic.task.supervisor import WorkerSupervisor

    for _ in given:  # Spark reuses a Python process for another task only if all its input was read
        pass
    context = TaskContext.get()
    assert context is not None
    resources = context.resources()
    gpus = tuple(resources["gpu"].addresses) if "gpu" in resources else ()
    if len(gpus) > 1:
        raise SlotConfigurationError(
            f"this task was given {len(gpus)} GPUs ({', '.join(gpus)}), a worker uses one: set "
            "spark.task.resource.gpu.amount=1 and run more workers"
        )
    try:
        gpus = tuple(map(gpu_at, gpus))
    except ValueError as error:
        raise SlotConfigurationError(str(error)) from None
    runtime = REAL_RUNTIME
    if os.environ.get("SPARK_REUSE_WORKER"):  # else Spark ends this process after the task
        runtime = replace(runtime, supervisor=partial(WorkerSupervisor, start=ask_importer))
    return run_task(ticket, TaskPlace(slot, context.attemptNumber(), gpus, max(int(context.cpus()), 1)), runtime)


def find_executor() -> int:
    """Return the pid of the executor in which this task runs."""
    from spark_elastic.task.facts import find_executor_pid

    return find_executor_pid()
