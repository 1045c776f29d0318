"""Classes and functions of the user's script, which no other process can import, and which each process has by the same names.

They travel by value. A copy of a class is another class, though: an enum's member that came from another worker, or from a
checkpoint, would equal none of the script's, and every comparison with it would be False without a word. So whoever has a class
or a function of the script by this name takes that one.
"""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
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
    if isinstance(value, type) and "<locals>" in value.__qualname__:
        return found_here, (value.__qualname__, cloudpickle.dumps(value), value.__bases__, _described(value))
    if not isinstance(value, _KINDS) or value.__module__ != "__main__" or _in_script(value.__qualname__) is not value:
        return None
    return found_here, (value.__qualname__, cloudpickle.dumps(value))


# Checkpoints refer to this function by its name; see ``_saved_names``.
def found_here(name: str, packed: bytes, bases: tuple[type, ...] = (), described: str = "") -> object:
    """Return what the script calls by this name here, or what was pickled if there is nothing.

    bases, described: of a class that a function has defined. A function may define many by one name: only one that is alike
    counts, and if there are several, there is no telling which is meant.
    """
    found = _defined_here(name, bases, described) if bases else _in_script(name)
    return cloudpickle.loads(packed) if found is None else found


def _defined_here(name: str, bases: tuple[type, ...], described: str) -> type | None:
    def look() -> list[type]:
        derived: set[type] = set().union(*(type.__subclasses__(base) for base in bases))
        return [kind for kind in derived if kind.__qualname__ == name and _described(kind) == described]

    if len(look()) > 1:
        gc.collect()  # classes of earlier calls, and what decorators have replaced
    found = look()
    return found[0] if len(found) == 1 else None


def _described(kind: type) -> str:
    """Describe a class by its plain attributes, its members if it is an enumeration, and the code of its methods."""
    parts: list[object] = [kind.__module__]
    # By their ids, what is said of functions that have been met.
    known: dict[int, object] = {}
    if issubclass(kind, enum.Enum):
        parts += [(name, _plain(member.value, known)) for name, member in kind.__members__.items()]
    for name, value in sorted(vars(kind).items()):
        function = getattr(value, "__func__", getattr(value, "fget", value))
        # Python adds other names of this kind when it pickles an instance.
        if isinstance(function, types.FunctionType) or not name.startswith("__") or name == "__slots__":
            parts.append((name, _plain(function, known)))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _plain(value: object, known: dict[int, object]) -> object:
    """Return what of a value is the same in every process. A function that is met again is told by a number."""
    if isinstance(value, types.CellType):
        try:
            return _plain(value.cell_contents, known)
        except ValueError:  # it has no value yet
            return "empty"
    if isinstance(value, (tuple, list)):
        return tuple(_plain(entry, known) for entry in value)
    if isinstance(value, frozenset):
        return sorted(repr(_plain(entry, known)) for entry in value)
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_names, _plain(value.co_consts, known)
    if isinstance(value, types.FunctionType):
        if id(value) in known:
            return known[id(value)]
        known[id(value)] = f"function {len(known)}"
        options = tuple((value.__kwdefaults__ or {}).items())
        return _plain((value.__code__, value.__defaults__, options, value.__closure__), known)
    return value if isinstance(value, (str, bytes, int, float, complex, type(None))) else type(value).__name__


def _in_script(name: str) -> object:
    first, *inner = name.split(".")
    found = _names.get(first, getattr(sys.modules["__main__"], first, None))
    for part in inner:
        found = getattr(found, part, None)
    # What the script has imported is not its own.
    is_its_own = isinstance(found, _KINDS) and (found.__module__, found.__qualname__) == ("__main__", name)
    return found if is_its_own else None
