"""Queries that call our own functions, in a session of either kind: for a driver that runs in a slot, and for ``shutdown``.

Rows are byte strings, in both directions. Everything that a session returns from a task arrives when the task has ended.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from spark_elastic.launchers.connect import end_in
from spark_elastic.launchers.defaults import unlogged
from spark_elastic.launchers.session import is_connect
from spark_elastic.launchers.session_watch import SessionWatch
from spark_elastic.launchers.spark import cancellation_in, inherited_properties, is_gone

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

logger = logging.getLogger("spark_elastic")

END_SECONDS = 20.0
# How often queries are interrupted until they have ended, because another one may be about to be submitted.
INTERRUPT_SECONDS = 0.2
# Loggers that write what is sent at level DEBUG, and the job's key with it.
_LOGGERS = ("pyspark.sql.connect.logging", "pyspark.sql.connect.client.core", "py4j.java_gateway", "py4j.clientserver")

# What a query's task does: it takes rows and returns rows. It is pickled. A long task yields None now and then: Spark checks
# for cancellation whenever it is given a row, and otherwise kills the process only seconds later.
RowsFunction = Callable[[Iterable[bytes]], Iterable[bytes | None]]

# How many bytes of rows travel with one task. Spark holds a task in memory several times, and refuses it beyond
# spark.rpc.message.maxSize (128 MiB).
_TASK_BYTES = 8 * 2**20

# How many bytes pyspark buffers before it passes them on to Spark.
_BUFFER_BYTES = 65536


class Queries:
    """Runs queries, each on a thread of its own, from ``__enter__`` to ``__exit__``, which interrupts those that still run.

    ended: why no query will run any more, once that is known without one; else empty.
    """

    def __init__(self, session: SparkSession | ConnectSession, run_id: str) -> None:
        self._session = session
        self._name = f"spark_elastic-{run_id}-driver"
        self._numbers = itertools.count()
        # The threads that run, and those that have ended since the last query was submitted.
        self._threads: dict[str, threading.Thread] = {}
        # The calling thread's, by which the user may cancel queries: the one in a classic session, the other in Spark Connect.
        self._properties: dict[str, str] = {}
        self._tags: frozenset[str] = frozenset()
        self._interrupter: threading.Thread | None = None
        self.ended = ""
        self._watch = SessionWatch(session, self._note_end) if is_connect(session) else None

    def __enter__(self) -> Queries:
        """Read the calling thread's local properties. After that it makes no call to the JVM, which Ctrl-C could interrupt."""
        if is_connect(self._session):
            self._tags = frozenset(self._session.getTags())
        else:
            self._properties = inherited_properties(cast("SparkSession", self._session))
        if self._watch is not None:
            self._watch.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        """Interrupt queries until none is left, for at most ``END_SECONDS``. If the server is gone, none can be interrupted."""
        deadline = time.monotonic() + END_SECONDS
        while (left := self._running()) and not self.ended and time.monotonic() < deadline:
            self.interrupt()
            next(iter(left.values())).join(INTERRUPT_SECONDS)
        if self._interrupter is not None and not self.ended:
            self._interrupter.join(max(deadline - time.monotonic(), 0.0))
        if self._watch is not None:
            self._watch.__exit__()

    def submit(
        self, function: RowsFunction, description: str, rows: Sequence[bytes] = (), tasks: int = 1
    ) -> concurrent.futures.Future[list[bytes]]:
        """Run ``function`` on ``rows`` as one task, or without rows in several. The future holds the result or Spark's error."""
        future: concurrent.futures.Future[list[bytes]] = concurrent.futures.Future()
        tag = f"{self._name}-{next(self._numbers)}"
        thread = threading.Thread(
            target=self._run,
            args=(tag, description, function, partial(self._frame, rows, tasks), future),
            name="spark_elastic-query",
            daemon=True,
        )
        thread.start()
        self._threads = {**self._running(), tag: thread}
        return future

    def interrupt(self) -> None:
        """Have all queries interrupted, whether they run or wait. Returns at once: a server that is gone is asked for minutes."""
        if self._interrupter is None or not self._interrupter.is_alive():
            self._interrupter = threading.Thread(target=self._interrupt, name="spark_elastic-interrupt", daemon=True)
            self._interrupter.start()

    def _interrupt(self) -> None:
        for tag in self._running():
            try:
                if is_connect(self._session):
                    self._session.interruptTag(tag)
                else:
                    self._session.sparkContext.cancelJobsWithTag(tag)
            except Exception:
                logger.debug("could not interrupt %s", tag, exc_info=True)

    def find_end(self, error: BaseException) -> str:
        """Return, from the error of one query, how the session has ended all of them; empty if it has not."""
        said = str(error)
        if is_connect(self._session):
            if self._session.is_stopped:
                return "its Spark Connect session was stopped"
            return "its queries were interrupted" if "OPERATION_CANCELED" in said else end_in(said)
        if is_gone(self._session.sparkContext):
            return "the SparkContext was stopped"
        return cancellation_in(said)

    def _note_end(self, reason: str) -> None:
        self.ended = reason

    def _run(
        self,
        tag: str,
        description: str,
        function: RowsFunction,
        frame: Callable[[], Any],
        future: concurrent.futures.Future[list[bytes]],
    ) -> None:
        try:
            # This applies to the queries of this thread, which runs no others.
            if is_connect(self._session):
                for each in (*self._tags, tag):
                    self._session.addTag(each)
            else:
                context = self._session.sparkContext
                for name, value in self._properties.items():
                    context.setLocalProperty(name, value)
                context.addJobTag(tag)  # beside those of the caller
                context.setJobDescription(description)
            with unlogged(*_LOGGERS):
                answers = frame().mapInArrow(RowsMap(function), "row binary, filling binary")
                found = answers.where("row is not null").collect()
            result = [bytes(row[0]) for row in found]
        except BaseException as error:
            logger.debug("query %s ended", tag, exc_info=True)
            future.set_exception(error)
        else:
            future.set_result(result)

    def _running(self) -> dict[str, threading.Thread]:
        return {tag: thread for tag, thread in self._threads.items() if thread.is_alive()}

    def _frame(self, rows: Sequence[bytes], tasks: int) -> Any:
        if not rows:
            return self._session.range(0, tasks, 1, numPartitions=tasks).selectExpr(
                "id as number", "cast(null as binary) as row"
            )
        frame = self._session.createDataFrame(list(enumerate(rows)), "number long, row binary")
        # A shuffle costs little beside the rows that it is for, and each of its tasks brings a part of them.
        return frame.repartition(1) if sum(map(len, rows)) > _TASK_BYTES else frame.coalesce(1)


class RowsMap:
    """A function of rows for ``DataFrame.mapInArrow``."""

    def __init__(self, function: RowsFunction) -> None:
        self._function = function

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Call the function once all rows are there; pass on each of its rows in a batch of its own. None becomes a null row."""
        import pyarrow as pa

        numbered = [entry for batch in batches for entry in zip(*batch.to_pydict().values(), strict=True)]
        for row in self._function([row for _, row in sorted(numbered) if row is not None]):
            filling = None if row is not None else bytes(_BUFFER_BYTES)
            columns = [pa.array([value], pa.binary()) for value in (row, filling)]
            yield pa.RecordBatch.from_arrays(columns, ["row", "filling"])
