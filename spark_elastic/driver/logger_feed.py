"""LoggerFeed: turns the events of a job into calls of the user's loggers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from spark_elastic.loggers import Logger, list_of_loggers
from spark_elastic.protocol.records import (
    Entry,
    JobFailed,
    JobFinished,
    JobStarted,
    WorkerReported,
    WorldBroken,
    WorldFormed,
)
from spark_elastic.protocol.reports import Entered, Metrics

logger = logging.getLogger("spark_elastic")


class LoggerFeed:
    """Feeds the user's loggers with the events of one job.

    Metrics are those of whichever worker is rank 0 at the time, and steps count commits. Steps that are repeated after a loss
    are not logged again: a value whose step lies before the last one of its name is left out. ``job/world_size`` and
    ``job/resets`` come from the driver, which does not know steps. They wait until rank 0 has reported its step: a job that
    resumes must not begin at step 0.
    """

    def __init__(self, loggers: Sequence[Logger], resumes: str | None) -> None:
        self._loggers = list_of_loggers(loggers)
        self._resumes = resumes
        # The last known step, and what is to be logged at the next one.
        self._step = 0
        self._waiting: dict[str, float] = {}
        self._resets = 0
        self._last: dict[str, int] = {}
        self._in_use = threading.Lock()

    def __enter__(self) -> LoggerFeed:
        """Start the loggers. If one raises, end those before it and raise its error."""
        for number, each in enumerate(self._loggers):
            try:
                each.start(self._resumes)
            except BaseException as error:
                del self._loggers[number:]
                self._finish(error)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the loggers, unless one of them still blocks."""
        if self._in_use.acquire(blocking=False):
            self._finish(error)
            self._in_use.release()

    def see(self, entry: Entry) -> None:
        """Pass on an entry of the event log. Blocks as long as the loggers do. A logger that raises is not called again."""
        with self._in_use:
            match entry.record:
                case JobStarted(run_id):
                    self._call("named", run_id)
                case WorldFormed(size=size):
                    self._waiting["job/world_size"] = size
                case WorldBroken():
                    self._resets += 1
                    self._waiting["job/resets"] = self._resets
                case WorkerReported(rank=0, report=Entered(step)):
                    self._reached(step, entry.time)
                case WorkerReported(rank=0, report=Metrics(values)):
                    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
                    step = int(numbers.pop("step"))
                    self._reached(step, entry.time)
                    self._log(step, numbers, entry.time)
                case JobFinished() | JobFailed():
                    self._reached(self._step, entry.time)

    def _reached(self, step: int, seconds: float) -> None:
        """Log what has waited for a step. After a fall back to a checkpoint, steps may be smaller than before."""
        self._step = max(self._step, step)
        self._log(self._step, self._waiting, seconds)
        self._waiting = {}

    def _log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        fresh = {name: float(value) for name, value in values.items() if step >= self._last.get(name, 0)}
        self._last.update(dict.fromkeys(fresh, step))
        if fresh:
            self._call("log", step, fresh, seconds)

    def _finish(self, error: BaseException | None) -> None:
        self._call("finish", None if error is None else f"{type(error).__name__}: {error}")

    def _call(self, method: str, *arguments: object) -> None:
        for each in list(self._loggers):
            try:
                getattr(each, method)(*arguments)
            except Exception as error:
                logger.exception("%s raised; it is not called any more, the job goes on", type(each).__name__)
                self._loggers.remove(each)
                if method != "finish":
                    with contextlib.suppress(Exception):  # it may still release what it holds
                        each.finish(f"{type(error).__name__}: {error}")
