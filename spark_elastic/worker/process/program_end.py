"""What Python does at the end of a program, for the user's function: workers are forks, and end without it."""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing.util
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from spark_elastic.task.processes import flush_open_files

logger = logging.getLogger("spark_elastic")

# A function whose threads or child processes keep it for longer is reported.
PATIENCE_SECONDS = 5.0
# After this time, what still runs is cut off, so that a thread which never ends does not keep the job's slots for ever.
LIMIT_SECONDS = 300.0
# How often the driver hears that this worker is not hung.
BEAT_SECONDS = 1.0

# Python itself uses these at its end, by the same names in all releases.
_threading: Any = threading
_multiprocessing: Any = multiprocessing.util
_finalize: Any = weakref.finalize


def forget_handlers() -> None:
    """In a fork, drop the exit handlers and finalizers of the process that it comes from."""
    atexit._clear()
    _finalize._registry.clear()
    _finalize._registered_with_atexit = False


def end_program(beat: Callable[[], None]) -> None:
    """Wait for threads and child processes that are not daemons, call exit handlers, and write what open files have buffered.

    This blocks as Python does at the end of a script, but each kind of thing for no longer than ``LIMIT_SECONDS``; only handlers
    take as long as they take. ``beat`` is called meanwhile. No thread pool can be used afterwards.
    """
    end = _End(beat)
    end.wait_for(_join_threads)
    end.call(atexit._run_exitfuncs)
    end.wait_for(_multiprocessing._exit_function)
    end.wait_for(flush_open_files)
    end.wait_for(logging.shutdown)


def end_failed_program() -> None:
    """Write what open files have buffered, if that takes no longer than ``PATIENCE_SECONDS``: other ranks wait for this one."""
    _start(flush_open_files).wait(PATIENCE_SECONDS)


class _End:
    """Waits for the parts of the end."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._is_told = False

    def wait_for(self, part: Callable[[], object]) -> None:
        """Call ``part`` on another thread, because it may never return."""
        over = _start(part)
        if not self._watch(over, LIMIT_SECONDS):
            logger.warning("cut off %g s after the function has returned: %s", LIMIT_SECONDS, _what_runs())

    def call(self, part: Callable[[], object]) -> None:
        """Call ``part`` on this thread, to which it may belong."""
        over = threading.Event()
        _start(partial(self._watch, over, math.inf))
        part()
        over.set()

    def _watch(self, over: threading.Event, limit: float) -> bool:
        """Wait until a part is over. Return False if that takes longer than ``limit``."""
        begun = time.monotonic()
        while not over.wait(BEAT_SECONDS):
            self._beat()
            waited = time.monotonic() - begun
            if waited > limit:
                return False
            if waited > PATIENCE_SECONDS and not self._is_told:
                self._is_told = True
                logger.warning(
                    "the function has returned, and its worker waits, as a script would, for %s: end that in the function, or "
                    "make it a daemon if it may be cut off, as happens to threads and processes after %g s",
                    _what_runs(), LIMIT_SECONDS,
                )  # fmt: skip
        return True


def _start(part: Callable[[], object]) -> threading.Event:
    """Call ``part`` on a thread of its own. The event is set when that is over, however it ends."""
    over = threading.Event()

    def run() -> None:
        try:
            part()
        finally:
            over.set()

    threading.Thread(target=run, name="spark_elastic-end", daemon=True).start()
    return over


def _join_threads() -> None:
    for call in reversed(_threading._threading_atexits):  # which end thread pools
        call()
    while waited_for := _threads():
        waited_for[0].join()


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]


def _what_runs() -> str:
    threads = [each.name for each in _threads()]
    processes = [each.name for each in multiprocessing.active_children() if not each.daemon]
    return ", ".join([*threads, *processes]) or "exit handlers, queues or files"
