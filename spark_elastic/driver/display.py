"""Shows a job's progress to whoever started it: a live line in terminals and notebooks, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from spark_elastic.driver.progress import JobView
from spark_elastic.protocol.records import Entry

logger = logging.getLogger("spark_elastic")

# The beginning of plain lines, and of live lines before the first step.
NAME = "spark_elastic"
LIVE_SECONDS = 0.25
# How often the live line is drawn until there is a job.
AGAIN_SECONDS = 1.0
# At least how many seconds pass between two plain lines, unless the job begins to do something else.
LINE_SECONDS = 10.0
END_SECONDS = 2.0


class ProgressDisplay:
    """Draws on a thread of its own, from ``__enter__`` to ``__exit__``, so that a blocked terminal delays nobody.

    ``see`` takes an entry of the event log and does not block. Any other writer to the terminal has to write inside ``aside``,
    or the line would be torn.
    """

    def __init__(self, progress: bool | None) -> None:
        if progress not in (True, False, None):
            raise TypeError(f"progress must be True, False or None, not {progress!r}")
        self._view = JobView()
        self._changed = threading.Condition()
        self._bar: Any = None if progress is False else make_bar()
        # A live line is shown from the beginning, and says what the job waits for.
        self._is_new = self._bar is not None
        self._ending = False
        # What the last plain line said, and when the next is due.
        self._shown, self._due = "", 0.0
        self._thread: threading.Thread | None = None
        if self._bar is not None or progress:
            self._thread = threading.Thread(target=self._run, name="spark_elastic-progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            logger.addFilter(self._make_room)
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(END_SECONDS)
        logger.removeFilter(self._make_room)

    def see(self, entry: Entry) -> None:
        """Take an event into account."""
        with self._changed:
            self._view.see(entry)
            self._is_new = True
            self._changed.notify()

    def aside(self, target: TextIO) -> AbstractContextManager[None]:
        """Hide the line while something else is written to ``target``."""
        return nullcontext() if self._bar is None else self._bar.external_write_mode(target)

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Wipe the line before a log message. Takes no lock, so that a thread that logs never waits."""
        _quietly(self._bar.clear, nolock=True)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._bar is not None:
                    self._changed.wait_for(lambda: self._ending, LIVE_SECONDS)
                # A starting Spark session also writes to the terminal, and overwrites this line.
                again = None if self._bar is None or self._view.has_begun else AGAIN_SECONDS
                self._changed.wait_for(lambda: self._ending or self._has_news(), again)
                if self._ending and not self._has_news():
                    break
                self._is_new = False
                self._shown, self._due = self._view.doing, time.monotonic() + LINE_SECONDS
                head, tail, share = self._view.head, self._view.tail, self._view.share
            if self._bar is not None:
                self._bar.head, self._bar.tail, self._bar.n = head or f"{NAME}:", tail, 1.0 if share is None else share
                self._bar.bar_format = "{head} {tail}" if share is None else "{head}|{bar}| {tail}"
                if again is not None:
                    self._bar.bar_format += "\r"
                _quietly(self._bar.refresh)
            else:
                # The head is padded for a live line, in which the numbers stay in their places.
                parts = (" ".join(head.split()), tail)
                _quietly(print, f"{NAME}: {', '.join(filter(None, parts))}", file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.leave = self._view.has_begun
            _quietly(self._bar.close)

    def _has_news(self) -> bool:
        if self._bar is not None:
            return self._is_new
        return self._view.doing != self._shown or (self._is_new and time.monotonic() >= self._due)


def _quietly(write: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Write to a terminal. The job continues if the terminal is closed or broken."""
    try:
        write(*args, **kwargs)
    except (OSError, ValueError, AttributeError):
        pass


def make_bar() -> object:
    """Return a tqdm bar for this terminal or notebook; None if there is neither, or if the notebook has no widgets."""
    notebook = _in_notebook()
    if not notebook and (sys.stderr is None or not sys.stderr.isatty()):
        return None
    if notebook:
        from tqdm import notebook as notebooks
        from tqdm.notebook import tqdm

        if getattr(notebooks, "IProgress", tqdm) is None:
            return None  # there is no ipywidgets, and a bar that is half made prints an error when it is collected
    else:
        from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # otherwise tqdm starts a thread that outlives the job
        head = tail = ""

        @property
        def format_dict(self) -> dict[str, object]:
            return {**super().format_dict, "head": self.head, "tail": self.tail}

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())  # by default tqdm also takes a lock between processes
    try:
        return Bar(total=1.0, bar_format="{head} {tail}", leave=True, **_size())
    except ImportError:  # ipywidgets
        return None


def _size() -> dict[str, int]:
    """Return the size of the terminal for tqdm, which draws nothing if the terminal reports no size, as in some containers."""
    try:
        is_known = min(os.get_terminal_size(sys.stderr.fileno())) > 0
    except OSError:
        is_known = False
    return {"dynamic_ncols": True} if is_known else {"ncols": 120, "nrows": 24}


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config
