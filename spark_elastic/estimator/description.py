"""Describes the value of a Param as JSON: equal in every session for the same value, different for different behaviour.

The user's own code is described by its content: a function's code and its values from closures, defaults, partials and globals;
an object's class and contents. Code of installed packages is described by its name, and a tensor by its content. Only the
weights of a network that is to be trained are left out.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import pickle
import re
import sys
import sysconfig
import types
from collections.abc import Mapping

import numpy as np
import torch

from spark_elastic._code import globals_of
from spark_elastic._json import Json
from spark_elastic._pickling import beside
from spark_elastic._saved_names import PACKAGES

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {*_HOOKS}
_NO_CODE = frozenset({"__dict__", "__doc__", "__module__", "__weakref__", "__firstlineno__", "__static_attributes__"})
# Packages whose objects show their values neither in attributes nor, if there are many, in their ``repr``.
_NOT_SHOWN = frozenset({"pandas", "pyarrow"})
# How many characters of a pattern its ``repr`` shows.
_SHOWN_OF_PATTERNS = 190
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))


def describe(value: object, *, weights: bool = True) -> Json:
    """Describe a value. weights: whether a network's weights count, rather than only their shapes."""
    return _Description(weights).of(value)


class _Description:
    """Walks through a value once. An object that contains itself is described by its name there, so that cycles end."""

    def __init__(self, weights: bool) -> None:
        self._weights = weights
        self._above: list[object] = []
        self._known: dict[int, tuple[object, Json]] = {}

    def of(self, value: object) -> Json:
        if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
            return value
        if id(value) not in self._known:
            if any(value is entry for entry in self._above):
                return ["again", _name(value)]
            self._above.append(value)
            # The value is kept beside its description, so that no other object gets its id.
            self._known[id(value)] = (value, self._composed(value))
            self._above.pop()
        return self._known[id(value)][1]

    def _composed(self, value: object) -> Json:
        """Describe a value by its parts."""
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {key: self.of(entry) for key, entry in value.items()}
            return ["mapping", *sorted(([self.of(key), self.of(entry)] for key, entry in value.items()), key=str)]
        if isinstance(value, (list, tuple)):
            return [self.of(entry) for entry in value]
        if isinstance(value, (set, frozenset)):
            return sorted((self.of(entry) for entry in value), key=str)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return ["array", str(value.dtype), list(value.shape), _hash(np.ascontiguousarray(value).tobytes())]
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, torch.optim.Optimizer):
            groups = [{**group, "params": len(group["params"])} for group in value.param_groups]
            return [self._class(type(value)), self.of(groups)]
        return self._of_object(value)

    def _of_object(self, value: object) -> Json:
        """Describe a callable, a class or a module; anything else is described by its attributes."""
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__self__), self.of(value.__func__)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if "__wrapped__" in getattr(value, "__dict__", ()):
            return ["wrapped", self.of(vars(value)["__wrapped__"])]
        if type(value).__module__.partition(".")[0] in _NOT_SHOWN:
            return ["pickled", _name(value), _hash(pickle.dumps(value, protocol=4))]
        if isinstance(value, re.Pattern) and len(value.pattern) > _SHOWN_OF_PATTERNS:
            return ["pattern", str(value.pattern), value.flags]
        held = {} if isinstance(value, enum.Enum) or hasattr(value, "__qualname__") else _attributes(value)
        if not held and (isinstance(value, enum.Enum) or _is_installed(type(value).__module__)):
            return _ADDRESS.sub("", repr(value))
        return [self._class(type(value)), self.of(held)]

    def _tensor(self, value: torch.Tensor) -> Json:
        # Hooks and attributes of other objects may hold parameters.
        if isinstance(value, torch.nn.Parameter) and not self._weights:
            return _shape(value)
        plain = value.detach().cpu().contiguous() if value.layout == torch.strided else value.detach().cpu().to_dense()
        return [
            "tensor",
            str(value.dtype),
            list(value.shape),
            _hash(plain.flatten().view(torch.uint8).numpy().tobytes()),
        ]

    def _module(self, value: torch.nn.Module) -> Json:
        """Describe a module by its class, attributes and parts, and by the content of its state, or only its shapes."""
        if isinstance(value, torch.jit.ScriptModule):
            return [_name(value), _hash(str(value.code).encode()), self.of(_shapes(value))]
        attributes = {name: entry for name, entry in vars(value).items() if name not in _OF_EVERY_MODULE}
        hooks = [hook for kind in _HOOKS for hook in attributes.pop(kind).values()]
        told = {name: self.of(entry) for name, entry in attributes.items()} | (
            {"hooks": self.of(hooks)} if hooks else {}
        )
        own = {**value._parameters, **value._buffers}
        kept = {name for name in own if self._weights or name in value._non_persistent_buffers_set}
        told |= {name: self.of(entry) if name in kept else _shape(entry) for name, entry in own.items()}
        frozen = sorted(
            name for name, entry in value._parameters.items() if entry is not None and not entry.requires_grad
        )
        if frozen and not self._weights:  # if weights count, nothing is trained
            told["frozen"] = list(frozen)
        others = {name: beside(entry) for name, entry in value._parameters.items() if entry is not None}
        told |= {f"beside {name}": self.of(entry) for name, entry in others.items() if entry}
        return [self._class(type(value)), told | {name: self.of(part) for name, part in value._modules.items()}]

    def _function(self, value: types.FunctionType) -> Json:
        values = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        told: list[Json] = [_name(value), self.of(values), self.of(value.__defaults__), self.of(value.__kwdefaults__)]
        if _is_installed(value.__module__):
            return told
        used = {name: value.__globals__[name] for name in globals_of(value.__code__) if name in value.__globals__}
        return [*told, _hash(_code(value.__code__)), {name: self._used(used[name], value) for name in sorted(used)}]

    def _used(self, value: object, function: types.FunctionType) -> Json:
        """Describe a global of a function: code by a hash, and a user's module by what the function may take from it."""
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            named = {
                name: getattr(value, name) for name in sorted(_names_of(function.__code__)) if hasattr(value, name)
            }
            return {name: self._used(entry, function) for name, entry in named.items() if entry is not value}
        told = self.of(value)
        return _hash(json.dumps(told).encode()) if callable(value) else told

    def _class(self, value: type) -> Json:
        """Describe a class by its name, and by its content if it is the user's own."""
        own = [kind for kind in value.__mro__ if not _is_installed(kind.__module__)]
        if not own:
            return _name(value)
        if any(value is entry for entry in self._above[:-1]):
            return ["again", _name(value)]
        self._above.append(value)
        parts = [
            {name: self.of(_unwrapped(part)) for name, part in vars(kind).items() if name not in _NO_CODE}
            for kind in own
        ]
        self._above.pop()
        return [_name(value), _hash(json.dumps(parts).encode())]


def _unwrapped(part: object) -> object:
    if isinstance(part, property):
        return [part.fget, part.fset]
    return getattr(part, "__func__", part)


def _attributes(value: object) -> dict[str, object]:
    given = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in given for name in ((names,) if isinstance(names, str) else names) if name != "__dict__"]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


def _code(code: types.CodeType) -> bytes:
    """Return the content of compiled code, without its place in a file."""
    constants = [_code(entry) if isinstance(entry, types.CodeType) else _constant(entry) for entry in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return repr((code.co_code, names, constants)).encode()


def _constant(value: object) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _names_of(code: types.CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_of, nested))


def _is_installed(module: str | None) -> bool:
    """Whether a module belongs to Python or to an installed package, and not to a script, a notebook or a project."""
    top = (module or "").partition(".")[0]
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names or top in ("torch", "spark_elastic"):
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return file.startswith(_INSTALLED)


def _shapes(module: torch.nn.Module) -> dict[str, Json]:
    return {name: _shape(entry) for name, entry in module.state_dict().items()}


def _shape(value: object) -> list[int] | None:
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _name(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(named, "__module__", None) or ""
    # Our own modules may move, so their names do not count. Classes that saved files know already have the name of a public
    # package.
    is_inside = module.startswith("spark_elastic.") and module not in PACKAGES
    return f"{'spark_elastic' if is_inside else module}.{named.__qualname__}"
