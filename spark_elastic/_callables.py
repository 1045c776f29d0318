"""What kind of function users have given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable


def is_deferred(function: object) -> bool:
    """Whether a call of ``function`` only makes a coroutine or a generator, and runs none of its code."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(
        inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
        for called in (function, getattr(type(function), "__call__", None))  # noqa: B004  # its class's, for objects
    )


def takes(function: Callable[..., object], count: int) -> bool:
    """Whether ``function`` can be called with so many arguments by position. What hides its parameters can."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # it has no signature, as some functions written in C
        return True
    return True
