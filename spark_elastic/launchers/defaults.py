"""What launchers share: default sizes, pauses between attempts, and a guard that keeps the key out of logs."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RESUBMIT_SECONDS = 0.5
RESUBMIT_LIMIT_SECONDS = 10.0
# A run that gave back its slots requests them again after a random time between these, so that two runs do not stay in step.
YIELD_SECONDS = (1.0, 6.0)
CGROUP = Path("/sys/fs/cgroup")


def fill_sizes(present: int, num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
    """Return ``min_np``, ``num_proc`` and ``max_np``, filling in those that are None, given ``present`` slots."""
    if max_np is None:
        max_np = max(present, min_np or 1, num_proc or 1)
    if min_np is None:
        min_np = num_proc or max_np
    return min_np, num_proc or min_np, max_np


def pause_after(failures: int) -> float:
    """Return how long to wait after this many failures in a row."""
    return float(min(RESUBMIT_SECONDS * 2 ** min(failures - 1, 10), RESUBMIT_LIMIT_SECONDS))


def cores() -> int:
    """Return how many cores this process may use: its CPU affinity, or less if its container has a quota (``--cpus=2``)."""
    return max(int(min(len(os.sched_getaffinity(0)), _quota())), 1)


def _quota() -> float:
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroup versions 2 and 1
        try:
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
        except OSError:
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


@contextmanager
def unlogged(*names: str) -> Iterator[None]:
    """Have these loggers drop messages of the calling thread."""
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in names]
    for quiet in loggers:
        quiet.addFilter(is_of_others)
    try:
        yield
    finally:
        for quiet in loggers:
            quiet.removeFilter(is_of_others)
