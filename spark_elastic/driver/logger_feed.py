"""LoggerFeed: turns the events of a job into what loggers log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from spark_elastic.loggers import Logger

logger = logging.getLogger("spark_elastic")


class LoggerFeed:
    """Feeds the user's loggers with the events of one job.

    Metrics are those of the rank 0 of that time, by the number of commits. What is done again after a loss is not logged again: a
    value whose step lies before the last one of its name is left out. ``job/world_size`` and ``job/resets`` come from the driver.
    """

    def __init__(self, loggers: Sequence[Logger], resumes: str | None) -> None:
        if isinstance(loggers, (str, bytes)) or not isinstance(loggers, Sequence):
            raise TypeError(f"loggers must be a list of loggers, not {loggers!r}")
        for each in loggers:
            if not isinstance(each, Logger):
                raise TypeError(
                    f"loggers must be those of spark_elastic.loggers, or derived from its Logger, not {each!r}"
                )
        self._loggers = list(loggers)
        self._resumes = resumes
        self._step = 0
        self._resets = 0
        self._last: dict[str, int] = {}
        self._in_use = threading.Lock()

    def __enter__(self) -> LoggerFeed:
        """Start the loggers. Raises what one of them raises; those before it are ended."""
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

    def see(self, event: Mapping[str, Any]) -> None:
        """Hand an event on. Blocks as long as loggers do; one that raises is left out from then on."""
        with self._in_use:
            kind = event["event"]
            if kind == "job_started":
                self._call("named", event["run_id"])
            elif kind == "metrics" and event["rank"] == 0:
                values = {name: value for name, value in event["values"].items() if not isinstance(value, str)}
                self._step = int(values.pop("step"))
                self._log(values, event["time"])
            elif kind == "world_formed":
                self._log({"job/world_size": event["size"]}, event["time"])
            elif kind == "world_broken":
                self._resets += 1
                self._log({"job/resets": self._resets}, event["time"])

    def _log(self, values: Mapping[str, float], seconds: float) -> None:
        fresh = {name: float(value) for name, value in values.items() if self._step >= self._last.get(name, 0)}
        self._last.update(dict.fromkeys(fresh, self._step))
        if fresh:
            self._call("log", self._step, fresh, seconds)

    def _finish(self, error: BaseException | None) -> None:
        self._call("finish", None if error is None else f"{type(error).__name__}: {error}")

    def _call(self, method: str, *arguments: object) -> None:
        for each in list(self._loggers):
            try:
                getattr(each, method)(*arguments)
            except Exception:
                logger.exception("%s raised; it is not called any more, the job goes on", type(each).__name__)
                self._loggers.remove(each)
