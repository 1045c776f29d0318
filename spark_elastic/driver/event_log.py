"""EventLog: what happened to the job, as JSON lines and as calls of the user's ``on_event``."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

logger = logging.getLogger("spark_elastic")

SCHEMA_VERSION = 1


class EventLog:
    """Takes events from the driver's event loop and hands them on from a thread of its own, in order.

    A slow disk or a slow callable delays nobody. An ``on_event`` that raises is logged once and called no more. ``watch`` is
    ours: it is called first, and neither blocks nor raises.
    """

    def __init__(
        self,
        path: str | None,
        on_event: Callable[[dict[str, Any]], None] | None,
        watch: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event must be callable, not {on_event!r}")
        self._file = Path(path).open("a", encoding="utf-8") if path is not None else None  # noqa: SIM115
        self._on_event = on_event
        self._watch = watch
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spark_elastic-events", daemon=True)

    def __enter__(self) -> EventLog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10)
        self._close_file()

    def record(self, kind: str, **fields: Any) -> None:
        """Note an event with the present time; never blocks."""
        self._queue.put({"version": SCHEMA_VERSION, "time": time.time(), "event": kind, **fields})

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self._watch(event)
            if self._file is not None:
                self._write(event)
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:
                    logger.exception("on_event raised; it is not called any more")
                    self._on_event = None

    def _write(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(event, default=str) + "\n")
            self._file.flush()
        except OSError:
            logger.exception("the event log cannot be written; it ends here, the job goes on")
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:
            pass  # what could not be written has been reported
