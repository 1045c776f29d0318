"""``assert_never``: what Python has in ``typing`` from 3.11 on."""

from __future__ import annotations

from typing import NoReturn


def assert_never(value: NoReturn) -> NoReturn:
    """Stand where no value can come: a type checker complains if one can, as when a new member of a union is not handled."""
    raise AssertionError(f"{value!r} is not handled")
