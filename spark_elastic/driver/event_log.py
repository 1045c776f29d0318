"""EventLog: what happened to the job, written as JSON lines and passed to the user's ``on_event``."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from spark_elastic.errors import JobCancelledError
from spark_elastic.protocol.event_format import as_event, as_line
from spark_elastic.protocol.records import Entry, EventsDropped, JobFailed, JobFinished, JobStarted, Record

logger = logging.getLogger("spark_elastic")

# How many events may wait: those of several minutes of a large job, which take some megabytes.
QUEUE_LIMIT = 10_000
END_SECONDS = 10.0


def _opened(path: Path) -> TextIO:
    """Open a log to append to. A last line that was cut off, as by a full disk, is ended: the first event would be lost to it."""
    file = path.open("a", encoding="utf-8")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        with path.open("rb") as written:
            length = written.seek(0, os.SEEK_END)
            written.seek(max(length - 1, 0))
            if written.read() not in (b"", b"\n"):
                file.write("\n")
    return file


class EventLog:
    """Takes records from the driver's event loop and hands them on as events, from a thread of its own, in order.

    After the event that ends the job, only the number of dropped events is handed on.

    A slow disk or a slow callable delays nobody: when ``QUEUE_LIMIT`` events wait, new ones are dropped until half of the queue
    is empty. An ``events_dropped`` event in their place says how many. An ``on_event`` that raises is logged once and not
    called again. ``watchers`` belong to this package: they are called first, with entries, and neither block nor raise.
    """

    def __init__(
        self,
        path: str | None,
        on_event: Callable[[dict[str, Any]], None] | None,
        watchers: Sequence[Callable[[Entry], None]] = (),
    ) -> None:
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event must be callable, not {on_event!r}")
        self._file = _opened(Path(path)) if path is not None else None
        self._on_event = on_event
        self._watchers = watchers
        # The id of the run, from its first event on.
        self._run_id: str | None = None
        self._changed = threading.Condition()
        self._waiting: deque[Entry] = deque()
        self._dropped = 0
        self._has_begun = self._has_ended = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="spark_elastic-events", daemon=True)

    def __enter__(self) -> EventLog:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait until all recorded entries are handed on, but no longer than ``END_SECONDS``."""
        with self._changed:
            self._is_closing = True
            self._tell_of_dropped()
            self._changed.notify_all()
        self._thread.join(timeout=END_SECONDS)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            what = "on_event" if self._on_event is not None else "the file of the event log"
            logger.warning("%d events were not handed on within %g s: %s is too slow", left, END_SECONDS, what)

    def record(self, record: Record) -> None:
        """Note a record with the present time; never blocks."""
        self.pass_on(Entry(time.time(), record))

    def failed(self, error: BaseException) -> None:
        """Note the error with which ``run`` ends, if a job has begun whose end is not known yet; never blocks."""
        if self._has_begun:
            told = error if isinstance(error, Exception) else JobCancelledError("run() was interrupted")
            self.record(JobFailed(type(told).__name__, str(told)))

    def pass_on(self, entry: Entry) -> None:
        """Note an entry that already has its time; never blocks."""
        with self._changed:
            if self._has_ended and not isinstance(entry.record, EventsDropped):
                return  # workers sent this before they knew that the job had ended
            self._has_begun |= isinstance(entry.record, JobStarted)
            self._has_ended |= isinstance(entry.record, (JobFinished, JobFailed))
            room = (QUEUE_LIMIT // 2 if self._dropped else QUEUE_LIMIT) - len(self._waiting)
            if room <= 0 and not self._is_closing:
                if not self._dropped:
                    logger.warning("events are dropped: %d wait for on_event, or for the file, already", QUEUE_LIMIT)
                self._dropped += 1
                return
            self._tell_of_dropped()
            self._waiting.append(entry)
            self._changed.notify_all()

    def _tell_of_dropped(self) -> None:
        count, self._dropped = self._dropped, 0
        if count:
            self.record(EventsDropped(count))

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            if isinstance(entry.record, JobStarted):
                self._run_id = entry.record.run_id
            for watch in self._watchers:
                watch(entry)
            event = as_event(msgspec.structs.replace(entry, run=self._run_id))
            if self._file is not None:
                self._write(event)
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except BaseException:  # SystemExit, for example, ends no more than this function, either
                    logger.exception("on_event raised; it is not called any more")
                    self._on_event = None
        self._close_file()

    def _next(self) -> Entry | None:
        """Wait for the next entry; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, event: dict[str, object]) -> None:
        assert self._file is not None
        try:
            self._file.write(as_line(event))
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
            pass  # lines that could not be written have been reported
