"""Classes of the user's script, which no other process can import, and which each process of a job has under the same names.

They travel by value. A copy of a class is another class, though: an enum's member that came from another worker, or from a
checkpoint, would equal none of the script's, and every comparison with it would be False without a word. So whoever has a class
of the script by this name takes that one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

# What the user's script calls by a name, where this process runs a function of the script rather than the script itself.
_names: Mapping[str, object] = {}


def remember_script(function: Callable[..., object]) -> None:
    """Look up classes of the script by the names that this function and what was pickled with it use."""
    global _names
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = inspect.unwrap(getattr(plain, "__func__", plain))
    if not hasattr(plain, "__globals__"):  # an object that can be called
        plain = vars(type(plain)).get("__call__")
    _names = getattr(plain, "__globals__", {})


def reduced(value: object) -> tuple[Callable[..., object], tuple[object, ...]] | None:
    """Return how a class of the script is pickled; None for anything else."""
    if not isinstance(value, type) or value.__module__ != "__main__" or _in_script(value.__qualname__) is not value:
        return None
    return class_here, (value.__qualname__, cloudpickle.dumps(value))


# Checkpoints refer to this function by its name and that of its module.
def class_here(name: str, packed: bytes) -> object:
    """Return the class of this name in the script, or the one that was pickled if there is none."""
    found = _in_script(name)
    return cloudpickle.loads(packed) if found is None else found


def _in_script(name: str) -> type | None:
    first, *inner = name.split(".")
    found = _names.get(first, getattr(sys.modules["__main__"], first, None))
    for part in inner:
        found = getattr(found, part, None)
    # What the script has imported is not its own.
    is_its_own = isinstance(found, type) and (found.__module__, found.__qualname__) == ("__main__", name)
    return found if is_its_own else None  # type: ignore[return-value]
