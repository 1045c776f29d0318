"""The names by which saved files refer to this package's classes: a public package, whichever module defines the class.

A pickle names the module of each class in it, and Spark ML's metadata names the class itself. Both outlive the layout of the
modules. A class that may be saved therefore declares the package that exports it as its module (``saved_as``). Classes that
earlier releases saved under module names are looked up in that package, too.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

PACKAGES = ("spark_elastic", "spark_elastic.data", "spark_elastic.estimator")
# What saved files refer to and no package exports, with the modules that have it now.
_UNEXPORTED = {"found_here": "spark_elastic._script"}

T = TypeVar("T", bound=type)


def saved_as(package: str) -> Callable[[T], T]:
    """Return a class decorator that makes saved files refer to the class by ``package``, which exports it."""

    def name(kind: T) -> T:
        kind.__module__ = package
        return kind

    return name


def home_of(module: str, name: str) -> str:
    """Return the module that has a saved name now: the innermost enclosing public package that exports it, else ``module``."""
    outermost, around = name.partition(".")[0], module.rpartition(".")[0]
    if module.partition(".")[0] == "spark_elastic" and name in _UNEXPORTED:
        return _UNEXPORTED[name]
    while around:
        if around in PACKAGES and outermost in importlib.import_module(around).__all__:
            return around
        around = around.rpartition(".")[0]
    return module


class Unpickler(pickle.Unpickler):
    """Unpickles what any release has saved. As with every pickle, whoever wrote it can run code here."""

    def find_class(self, module: str, name: str) -> object:
        return super().find_class(home_of(module, name), name)


def loads(data: bytes) -> Any:
    """Unpickle what any release has saved."""
    return Unpickler(io.BytesIO(data)).load()
