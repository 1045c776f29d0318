"""Waits for what a test has started to be gone."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_settles(left: Callable[[], object], seconds: float) -> None:
    """Wait until ``left`` finds nothing, so many seconds at most."""
    end = time.monotonic() + seconds
    while found := left():
        assert time.monotonic() < end, f"left behind: {found}"
        time.sleep(0.1)
