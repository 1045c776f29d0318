"""Stand-ins of cluster managers, driven by real Spark; see README.md here.

Tests marked ``long`` are not part of ``make test``, but of ``make test-clusters``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from descendants import descendants

# What a stand-in or an application has started ends within this after both have been ended.
SETTLE_SECONDS = 15.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test no process may be there that was not there before."""
    before = set(descendants())
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := set(descendants()) - before:
        assert time.monotonic() < deadline, (
            f"left behind: {[(one.pid, one.cmdline()) for one in left if one.is_running()]}"
        )
        time.sleep(0.1)
