"""LoggerFeed: turns the events of a job into calls of the user's loggers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from spark_elastic.loggers import Logger, list_of_loggers
from spark_elastic.protocol.records import (
    Entry,
    JobFailed,
    JobFinished,
    JobStarted,
    Record,
    WorkerReported,
    WorldBroken,
    WorldForming,
)
from spark_elastic.protocol.reports import Entered, Metrics

logger = logging.getLogger("spark_elastic")


# How many events may wait for slow loggers, and for how long the end of a job waits for these, before values are left out.
WAITING_LIMIT = 1000
END_SECONDS = 10.0


@dataclass(slots=True)
class _Last:
    """The last step of a name that rank 0 has reported: its generation, and how many values were logged and are to come again."""

    step: int
    generation: int
    logged: int = 1
    again: int = 0


class LoggerFeed:
    """Feeds the user's loggers with the events of one job, from a thread of its own.

    Metrics are those of whichever worker is rank 0 at the time, and steps count commits. Steps that are repeated after a loss
    are not logged again: a value is left out if its step lies before the last one of its name, and as many values are left out
    of that one in a later generation as had been logged. Step 0 is logged in each generation, because a function that makes no
    commits has no other step. ``job/world_size`` and ``job/resets`` come from the driver, which does not know steps. They wait
    until rank 0 has reported its step: a job that resumes must not begin at step 0.

    Loggers may be slower than the job. When ``WAITING_LIMIT`` events wait, or some still wait ``END_SECONDS`` after the job has
    ended, only the newest value of each name stays of those that wait.
    """

    def __init__(self, loggers: Sequence[Logger], resumes: str | None) -> None:
        self._loggers = list_of_loggers(loggers)
        self._resumes = resumes
        # The last known step, and what is to be logged at the next one.
        self._step = 0
        self._unlogged: dict[str, float] = {}
        self._resets = 0
        self._last: dict[str, _Last] = {}
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._is_thinned = self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spark_elastic-loggers", daemon=True)

    def __enter__(self) -> LoggerFeed:
        """Start the loggers. If one raises, end those before it and raise its error."""
        for number, each in enumerate(self._loggers):
            try:
                each.start(self._resumes)
            except BaseException as error:
                del self._loggers[number:]
                self._finish(error)
                raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have the loggers take what waits and end. Blocks for at most twice ``END_SECONDS``."""
        with self._changed:
            self._is_closing, self._error = True, error
            self._changed.notify_all()
        self._thread.join(timeout=END_SECONDS)
        if self._thread.is_alive():
            with self._changed:
                self._thin()
            self._thread.join(timeout=END_SECONDS)
        if self._thread.is_alive():
            logger.warning("loggers have not ended within %g s, and the job ends without them", 2 * END_SECONDS)

    def see(self, entry: Entry) -> None:
        """Take an entry of the event log; never blocks."""
        if not _is_logged(entry.record):
            return
        with self._changed:
            self._waiting.append(entry)
            if len(self._waiting) >= WAITING_LIMIT:
                self._thin()
            self._changed.notify_all()

    def _thin(self) -> None:
        self._waiting = newest_of(self._waiting)
        if not self._is_thinned:
            self._is_thinned = True
            logger.warning(
                "loggers are slower than the job's reports: values are left out, but not the last of each name"
            )

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            self._take(entry)
        self._finish(self._error)

    def _next(self) -> Entry | None:
        """Wait for the next entry; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.pop(0) if self._waiting else None

    def _take(self, entry: Entry) -> None:
        """Pass on an entry. A logger that raises is not called again."""
        match entry.record:
            case JobStarted(run_id):
                self._call("named", run_id)
            case WorldForming(size=size):
                self._unlogged["job/world_size"] = size
            case WorldBroken():
                self._resets += 1
                self._unlogged["job/resets"] = self._resets
            case WorkerReported(rank=0, report=Entered(step)):
                self._reached(step, entry.time)
            case WorkerReported(rank=0, generation=generation, report=Metrics(values)):
                numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
                step = int(numbers.pop("step"))
                self._reached(step, entry.time)
                fresh = {name: value for name, value in numbers.items() if self._is_new(name, step, generation)}
                self._log(step, fresh, entry.time)
            case JobFinished() | JobFailed():
                self._reached(self._step, entry.time)

    def _reached(self, step: int, seconds: float) -> None:
        """Log what has waited for a step. After a fall back to a checkpoint, steps may be smaller than before."""
        self._step = max(self._step, step)
        self._log(self._step, self._unlogged, seconds)
        self._unlogged = {}

    def _is_new(self, name: str, step: int, generation: int) -> bool:
        """Whether a value is none of a step that is done again, where as many values of the name come again as were logged."""
        last = self._last.get(name)
        if last is None or step > last.step:
            self._last[name] = _Last(step, generation)
            return True
        if step < last.step:
            return False
        if generation != last.generation and step:
            last.again = last.logged
        last.generation = generation
        if last.again:
            last.again -= 1
            return False
        last.logged += 1
        return True

    def _log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        if values:
            self._call("log", step, {name: float(value) for name, value in values.items()}, seconds)

    def _finish(self, error: BaseException | None) -> None:
        self._call("finish", None if error is None else f"{type(error).__name__}: {error}")

    def _call(self, method: str, *arguments: object) -> None:
        for each in list(self._loggers):
            try:
                getattr(each, method)(*arguments)
            except BaseException as error:  # SystemExit, for example, ends no more than this logger, either
                logger.exception("%s raised; it is not called any more, the job goes on", type(each).__name__)
                self._loggers.remove(each)
                if method != "finish":
                    with contextlib.suppress(BaseException):  # it may still release what it holds
                        each.finish(f"{type(error).__name__}: {error}")


def _is_logged(record: Record) -> bool:
    if isinstance(record, WorkerReported):
        return record.rank == 0 and isinstance(record.report, (Entered, Metrics))
    return isinstance(record, (JobStarted, WorldForming, WorldBroken, JobFinished, JobFailed))


def newest_of(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out values of metrics that have a newer one later."""
    kept: list[Entry] = []
    known: set[str] = set()
    for entry in reversed(entries):
        record = entry.record
        if isinstance(record, WorkerReported) and isinstance(record.report, Metrics):
            values = record.report.values
            fresh = {name: value for name, value in values.items() if name not in known and name != "step"}
            if not fresh:
                continue
            known |= fresh.keys()
            report = Metrics({"step": values["step"], **fresh})
            kept.append(msgspec.structs.replace(entry, record=msgspec.structs.replace(record, report=report)))
        else:
            kept.append(entry)
    return kept[::-1]
