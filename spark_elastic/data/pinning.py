"""A hook by which the first worker's bytes become those of the whole job.

This package does not know about jobs. A worker of a job installs a function with ``set_pin``; until then, ``pin`` just computes.
The pinned bytes must purely describe the dataset (a manifest, row counts), never a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import cloudpickle

Pin = Callable[[str, Callable[[], bytes]], bytes]


def _compute(key: str, make: Callable[[], bytes]) -> bytes:
    return make()


_pin: Pin = _compute


def set_pin(function: Pin | None) -> None:
    """Install the job's pin; None restores the default, which calls ``make`` every time."""
    global _pin
    _pin = function if function is not None else _compute


def key_of(value: object) -> str | None:
    """Return a key for a value from its pickle, equal in all processes; None if it cannot be pickled."""
    try:
        return hashlib.blake2b(cloudpickle.dumps(value), digest_size=8).hexdigest()
    except Exception:  # whatever an object that the value refers to raises
        return None


def pin(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the bytes that the job agreed on for ``key``, computing them with ``make()`` if no worker has yet. May block."""
    return _pin(key, make)
