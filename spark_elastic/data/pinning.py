"""One hook by which the first worker's bytes become the whole job's.

This package knows nothing of jobs. A worker of a job installs a function with `set_pin`; until then `pin` just computes. What
is pinned must be a pure description of the dataset (a manifest, row counts), never of a rank.
"""

from __future__ import annotations

from collections.abc import Callable

Pin = Callable[[str, Callable[[], bytes]], bytes]


def _compute(key: str, make: Callable[[], bytes]) -> bytes:
    return make()


_pin: Pin = _compute


def set_pin(function: Pin | None) -> None:
    """Install the job's pin; None puts back the default, which calls `make` every time."""
    global _pin
    _pin = function if function is not None else _compute


def pin(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the bytes that the job agreed on for `key`, computing them with `make()` if nobody has yet. May block."""
    return _pin(key, make)
