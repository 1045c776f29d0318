"""Sees from inside a task that Spark is taking its executor away, which Spark tells tasks by nothing else.

Whoever begins a decommission (a signal to the executor, Spark's driver, the cluster's manager by way of one of them), the
executor starts one thread that waits for its tasks and blocks before it ends, and lives until then. Linux shows it.
"""

from __future__ import annotations

import asyncio
import os

# "wait-for-blocks-to-migrate", of which Linux keeps 15 characters.
WAITING_THREAD = b"wait-for-blocks\n"
# Threads of another process give no event. A look takes 5 microseconds for each of them, so this is under a hundredth of a core.
LOOK_SECONDS = 0.5


async def executor_leaves(executor: int, pause: float = LOOK_SECONDS) -> None:
    """Wait until the executor that has this pid leaves. Waits on where it does not, or ends otherwise: others notice that."""
    while not is_leaving(executor):
        await asyncio.sleep(pause)


def is_leaving(executor: int) -> bool:
    """Whether the executor that has this pid is being decommissioned."""
    folder = f"/proc/{executor}/task"
    try:
        return any(_name_of(f"{folder}/{thread}/comm") == WAITING_THREAD for thread in os.listdir(folder))
    except OSError:
        return False


def _name_of(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""  # the thread has ended since the threads were listed
    try:
        return os.read(descriptor, 64)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
