"""Checks for numbers of seconds that users pass. NumPy's numbers are accepted, too."""

from __future__ import annotations

import numbers
from contextlib import suppress


def seconds_above(name: str, value: object) -> float:
    """Return a number of seconds above 0 as a float. Raises ``ValueError``, naming ``name``, for anything else."""
    seconds = _as_float(value)
    if seconds is None or not seconds > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")
    return seconds


def seconds_from(name: str, value: object) -> float:
    """Return a number of seconds from 0 on as a float. Raises ``ValueError``, naming ``name``, for anything else."""
    seconds = _as_float(value)
    if seconds is None or not seconds >= 0:
        raise ValueError(f"{name} must be a number of seconds from 0 on, not {value!r}")
    return seconds


def _as_float(value: object) -> float | None:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return None
