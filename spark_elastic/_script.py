"""Classes and functions of the user's script, which no other process can import, and which each process has by the same names.

They travel by value. A copy of a class is another class, though: an enum's member that came from another worker, or from a
checkpoint, would equal none of the script's, and every comparison with it would be False without a word. So whoever has a class
or a function of the script by this name takes that one.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

_KINDS = (type, types.FunctionType)
# What the user's script calls by a name, where this process runs a function of the script rather than the script itself.
_names: Mapping[str, object] = {}


def remember_script(function: Callable[..., object]) -> None:
    """Look up classes and functions of the script by the names that this function and what was pickled with it use."""
    global _names
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = inspect.unwrap(getattr(plain, "__func__", plain))
    if not hasattr(plain, "__globals__"):  # an object that can be called
        plain = getattr(type(plain), "__call__", None)  # noqa: B004
    _names = getattr(plain, "__globals__", {})


def reduced(value: object) -> tuple[Callable[..., object], tuple[object, ...]] | None:
    """Return how a class or a function of the script is pickled; None for anything else."""
    if not isinstance(value, _KINDS):
        return None
    bases = value.__bases__ if isinstance(value, type) and "<locals>" in value.__qualname__ else ()
    if not bases and (value.__module__ != "__main__" or _in_script(value.__qualname__) is not value):
        return None
    return found_here, (value.__module__, value.__qualname__, bases, cloudpickle.dumps(value))


# Checkpoints refer to this function by its name; see ``_saved_names``.
def found_here(module: str, name: str, bases: tuple[type, ...], packed: bytes) -> object:
    """Return what the script calls by this name here, or what was pickled if there is nothing.

    bases: of a class that a function has defined. If functions here have defined several by this name, there is no telling which
    is meant.
    """
    found = _in_script(name)
    if bases:
        derived: set[type] = set().union(*(type.__subclasses__(base) for base in bases))
        defined = [kind for kind in derived if (kind.__module__, kind.__qualname__) == (module, name)]
        found = defined[0] if len(defined) == 1 else None
    return cloudpickle.loads(packed) if found is None else found


def _in_script(name: str) -> object:
    first, *inner = name.split(".")
    found = _names.get(first, getattr(sys.modules["__main__"], first, None))
    for part in inner:
        found = getattr(found, part, None)
    # What the script has imported is not its own.
    is_its_own = isinstance(found, _KINDS) and (found.__module__, found.__qualname__) == ("__main__", name)
    return found if is_its_own else None
