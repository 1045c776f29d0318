"""What kind of function users have given."""

from __future__ import annotations

import functools
import inspect


def is_deferred(function: object) -> bool:
    """Whether a call of ``function`` only makes a coroutine or a generator, and runs none of its code."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(
        inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
        for called in (function, getattr(type(function), "__call__", None))  # noqa: B004  # its class's, for objects
    )
