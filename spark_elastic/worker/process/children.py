"""Children that user code forks: they end as other Python processes do, and never run on in this package's code.

A child has none of its parent's threads. If its exception reached the code that called the user's function, the child would
wait for the control thread for ever, and its parent for the child.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from spark_elastic.task.processes import end_with


@contextmanager
def ending_children() -> Iterator[None]:
    """End a process that was forked within this block and leaves it, with the exit code that Python would give it."""
    parent = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != parent:
            end_with(partial(_exit_code, error))
        raise
    if os.getpid() != parent:
        end_with(lambda: 0)


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        raise error
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
