"""What Python does at the end of a program, for the user's function: workers are forks, and end without it."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spark_elastic.task.processes import flush_open_files

logger = logging.getLogger("spark_elastic")

# A function whose threads or child processes keep it for longer is reported.
PATIENCE_SECONDS = 5.0


def end_program() -> None:
    """Wait for threads and child processes that are not daemons, call exit handlers, and write what open files have buffered.

    This blocks as long as Python would at the end of a script. No thread pool can be used afterwards. Exit handlers are those
    that were registered in this worker: it has none of the process that it was forked from.
    """
    # By these names, each release of Python calls them at its own end.
    threads: Any = threading
    processes: Any = multiprocessing.util
    with _reporting():
        threads._shutdown()  # which ends idle thread pools, too
        atexit._run_exitfuncs()
        processes._exit_function()
    flush_open_files()
    logging.shutdown()


@contextmanager
def _reporting() -> Iterator[None]:
    """Say what this block waits for, if that takes long."""
    is_over = threading.Event()
    threading.Thread(target=_report, args=(is_over,), name="spark_elastic-end", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _report(is_over: threading.Event) -> None:
    if is_over.wait(PATIENCE_SECONDS):
        return
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    processes = [each.name for each in multiprocessing.active_children() if not each.daemon]
    logger.warning(
        "the function has returned, and its worker still waits, as a script would, for %s: end them in the function, or make "
        "them daemons if they may be cut off",
        ", ".join([*threads, *processes]) or "an exit handler",
    )
