"""What launchers have in common: default sizes, pauses between attempts, and a guard that keeps the key out of logs."""

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
# A run that gave its slots back asks for them again after a random time between these, so that two runs do not keep in step.
YIELD_SECONDS = (1.0, 6.0)
CGROUP = Path("/sys/fs/cgroup")


def fill_sizes(present: int, num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
    """Fill in ``min_np``, ``num_proc`` and ``max_np``, in this order, where there are ``present`` slots."""
    if max_np is None:
        max_np = max(present, min_np or 1, num_proc or 1)
    if min_np is None:
        min_np = num_proc or max_np
    return min_np, num_proc or min_np, max_np


def pause_after(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return float(min(RESUBMIT_SECONDS * 2 ** min(failures - 1, 10), RESUBMIT_LIMIT_SECONDS))


def cores() -> int:
    """How many cores this process may use: those that it may run on, or fewer where its container has a quota (``--cpus=2``)."""
    return max(int(min(len(os.sched_getaffinity(0)), _quota())), 1)


def _quota() -> float:
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroups of version 2, and of 1
        try:
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
        except OSError:
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


@contextmanager
def unlogged(*names: str) -> Iterator[None]:
    """Have these loggers drop what the calling thread logs."""
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
