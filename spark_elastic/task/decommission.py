"""Notices from inside a task that Spark is decommissioning its executor. Spark does not inform tasks of this.

However a decommission begins (by a signal to the executor, by Spark's driver, or by the cluster manager through one of them),
the executor starts a thread that waits for its tasks and blocks, and ends only after them. Linux shows that thread.
"""

from __future__ import annotations

import asyncio
import os

# The thread's name is "wait-for-blocks-to-migrate", of which Linux keeps 15 characters.
WAITING_THREAD = b"wait-for-blocks\n"
# A new thread in another process causes no event, so threads are listed at this interval. Listing takes 5 microseconds per
# thread, in all less than a hundredth of a core.
LOOK_SECONDS = 0.5


async def executor_leaves(executor: int, pause: float = LOOK_SECONDS) -> None:
    """Wait until the executor with this pid is being decommissioned. If it just ends, this keeps waiting."""
    while not is_leaving(executor):
        await asyncio.sleep(pause)


def is_leaving(executor: int) -> bool:
    """Whether the executor with this pid is being decommissioned."""
    folder = f"/proc/{executor}/task"
    try:
        return any(_name_of(f"{folder}/{thread}/comm") == WAITING_THREAD for thread in os.listdir(folder))
    except OSError:
        return False


def _name_of(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""  # the thread has ended since it was listed
    try:
        return os.read(descriptor, 64)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
