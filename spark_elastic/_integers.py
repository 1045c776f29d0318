"""Checks for whole numbers that users pass: sizes, counts, seeds, epochs. NumPy integers are accepted, too."""

from __future__ import annotations

import numbers


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """Return a whole number as an int. Raises ``ValueError``, naming ``name``, for anything else and below ``least``.

    Booleans and floats are refused, even ``True`` and ``2.0``, because they suggest that something else was meant.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
        if least is None or value >= least:
            return value
    raise ValueError(f"{name} must be a whole number{'' if least is None else f' from {least} on'}, not {value!r}")
