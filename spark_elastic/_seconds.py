"""Checks for numbers of seconds that users pass. NumPy's numbers are accepted, too."""

from __future__ import annotations

import numbers


def seconds_above(name: str, value: object) -> float:
    """Return a number of seconds above 0 as a float. Raises ``ValueError``, naming ``name``, for anything else."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) > 0:
        return float(value)
    raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")


def seconds_from(name: str, value: object) -> float:
    """Return a number of seconds from 0 on as a float. Raises ``ValueError``, naming ``name``, for anything else."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) >= 0:
        return float(value)
    raise ValueError(f"{name} must be a number of seconds from 0 on, not {value!r}")
