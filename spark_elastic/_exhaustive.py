"""``assert_never``, which ``typing`` has from Python 3.11 on."""

from __future__ import annotations

from typing import NoReturn


def assert_never(value: NoReturn) -> NoReturn:
    """Mark unreachable code. A type checker complains if a value can reach it, such as an unhandled member of a union."""
    raise AssertionError(f"{value!r} is not handled")
