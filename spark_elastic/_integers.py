"""Whole numbers that users give: sizes, counts, seeds, epochs. NumPy's are taken for Python's."""

from __future__ import annotations

import numbers


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """Return a whole number as an int. Raises ``ValueError``, which calls it ``name``, for anything else or below ``least``.

    Booleans and floats are no whole numbers, not even ``True`` and ``2.0``: where they are given, something else was meant.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
        if least is None or value >= least:
            return value
    raise ValueError(f"{name} must be a whole number{'' if least is None else f' from {least} on'}, not {value!r}")
