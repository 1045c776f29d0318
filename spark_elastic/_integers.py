"""Whole numbers that users give: NumPy's are taken for Python's."""

from __future__ import annotations

import numbers
from typing import Any


def as_int(value: Any) -> Any:
    """Return a whole number of another type, such as one of NumPy's, as an int; anything else as it is."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value
