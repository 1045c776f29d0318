"""Finds the line of user code that a warning is about."""

from __future__ import annotations

import sys


def depth_of_user() -> int:
    """Return the stack level, as ``warnings.warn`` counts, of the first line that is not ours, torch's or pyspark's."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("spark_elastic", "torch", "pyspark"):
            return depth
        frame, depth = frame.f_back, depth + 1
    return 1
