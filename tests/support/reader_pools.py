"""Petastorm's pools of readers, and a look at what they leave."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import psutil

POOLS: list[dict[str, Any]] = [
    {"reader_pool_type": "dummy"},
    {"reader_pool_type": "thread", "workers_count": 3},
    {"reader_pool_type": "process", "workers_count": 2},
]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Have no thread of ours and no Python process more after the block than before it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("spark-elastic")] == []
    left = set(psutil.Process().children(recursive=True)) - before
    assert [process.name() for process in left if process.name().startswith("python")] == []
