"""Threads that are found by their names."""

from __future__ import annotations

import threading


def find_thread(name: str) -> threading.Thread:
    """Return the living thread of this name; there is one."""
    (found,) = [thread for thread in threading.enumerate() if thread.name == name]
    return found
