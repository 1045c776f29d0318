"""EventLog: what happened to the job, written as JSON lines and passed to the user's ``on_event``."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from spark_elastic._callables import is_deferred
from spark_elastic.errors import JobCancelledError
from spark_elastic.protocol.event_format import as_event, as_line
from spark_elastic.protocol.records import Entry, EventsDropped, JobFailed, JobFinished, JobStarted, Record

logger = logging.getLogger("spark_elastic")

# How many events may wait: those of several minutes of a large job, which take some megabytes.
QUEUE_LIMIT = 10_000
END_SECONDS = 10.0


class Sink(Protocol):
    """Where an ``EventLog`` hands its events to, one after the other. One that raises is closed and given no more."""

    name: str
    raised: str  # what is logged then

    def take(self, event: dict[str, object]) -> None:
        """Take an event; may block and raise."""

    def close(self) -> None:
        """End, after the last event; does not raise."""


class LogFile:
    """A file to which events are appended as JSON lines. Raises OSError if it cannot be opened."""

    name = "the file of the event log"
    raised = "the event log cannot be written; it ends here, the job goes on"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  # it lives as long as the log
        # A last line that was cut off, as by a full disk, is ended: the first event would be lost to it.
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            with Path(path).open("rb") as written:
                length = written.seek(0, os.SEEK_END)
                written.seek(max(length - 1, 0))
                if written.read() not in (b"", b"\n"):
                    self._file.write("\n")

    def take(self, event: dict[str, object]) -> None:
        """Write an event as a line."""
        self._file.write(as_line(event))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # lines that could not be written have been reported
            self._file.close()


class OnEvent:
    """The user's ``on_event``."""

    name = "on_event"
    raised = "on_event raised; it is not called any more"

    def __init__(self, call: Callable[[dict[str, object]], None]) -> None:
        if not callable(call):
            raise TypeError(f"on_event must be callable, not {call!r}")
        if is_deferred(call):
            raise TypeError(
                "on_event is a coroutine function or a generator, so that calling it runs none of its code: give a plain function"
            )
        self.take = call

    def close(self) -> None:
        """Do nothing: the function is the user's."""


class EventLog:
    """Takes records from the driver's event loop and hands them on as events, from a thread of its own, in order.

    After the event that ends the job, only the number of dropped events is handed on.

    A slow disk or a slow callable delays nobody: when ``QUEUE_LIMIT`` events wait, new ones are dropped until half of the queue
    is empty. An ``events_dropped`` event in their place says how many. ``watchers`` belong to this package: they are called
    with entries, and neither block nor raise. The sink has had each entry before: ``on_event``, which is called for a watcher,
    finds the event in the file.
    """

    def __init__(self, sink: Sink | None = None, watchers: Sequence[Callable[[Entry], None]] = ()) -> None:
        self._sink = sink
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
        if left and (sink := self._sink) is not None:
            logger.warning("%d events were not handed on within %g s: %s is too slow", left, END_SECONDS, sink.name)

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
                    name = "the display" if self._sink is None else self._sink.name
                    logger.warning("events are dropped: %d wait for %s already", QUEUE_LIMIT, name)
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
            if self._sink is not None:
                self._hand_on(self._sink, entry)
            for watch in self._watchers:
                watch(entry)
        if self._sink is not None:
            self._sink.close()

    def _hand_on(self, sink: Sink, entry: Entry) -> None:
        try:
            sink.take(as_event(msgspec.structs.replace(entry, run=self._run_id)))
        except BaseException:  # SystemExit of a callable, for example, ends no more than this sink, either
            logger.exception(sink.raised)
            self._sink = None
            sink.close()

    def _next(self) -> Entry | None:
        """Wait for the next entry; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None
