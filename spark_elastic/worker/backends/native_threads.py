"""Finds the threads of this process that are not Python's, and whether they are idle."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection
from pathlib import Path

_TASKS = Path("/proc/self/task")
# The kernel's letter for a thread that waits. One that has been woken up is running, even while it has no core. The number
# grows whenever a thread begins to wait.
_ASLEEP = re.compile(r"^State:\s+S.*^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE | re.DOTALL)


def native_threads() -> set[int]:
    """The threads that run no Python code of their own."""
    return {int(name) for name in os.listdir(_TASKS)} - {thread.native_id for thread in threading.enumerate()}


def rest(threads: Collection[int]) -> dict[int, int] | None:
    """Return how often each of these threads has begun to wait; None if one does not wait now, or there are none.

    Threads that have ended are left out. None of the threads has done anything between two calls that return the same.
    """
    waits = {}
    for thread in threads:
        try:
            status = (_TASKS / str(thread) / "status").read_text()
        except OSError:
            continue  # it has ended
        found = _ASLEEP.search(status)
        if found is None:
            return None
        waits[thread] = int(found[1])
    return waits if threads else None
