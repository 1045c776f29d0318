"""Names under which saved files know our classes: that of a public package, whatever module a class lives in.

A pickle names the module of each class in it, and Spark ML's metadata the class itself. Both outlive the layout of our
modules, so a class that may be saved calls the package that exports it its home (``saved_as``), and what earlier releases
wrote under names of modules is found there, too.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

PACKAGES = ("spark_elastic", "spark_elastic.data", "spark_elastic.estimator")

T = TypeVar("T", bound=type)


def saved_as(package: str) -> Callable[[T], T]:
    """Have saved files name a class by the package that exports it."""

    def name(kind: T) -> T:
        kind.__module__ = package
        return kind

    return name


def home_of(module: str, name: str) -> str:
    """Return the module by which something saved is found now: the innermost public package around it that exports it."""
    outermost, around = name.partition(".")[0], module.rpartition(".")[0]
    while around:
        if around in PACKAGES and outermost in importlib.import_module(around).__all__:
            return around
        around = around.rpartition(".")[0]
    return module


class Unpickler(pickle.Unpickler):
    """Unpickles what any release has saved. As with all pickles, whoever wrote it runs code here."""

    def find_class(self, module: str, name: str) -> object:
        return super().find_class(home_of(module, name), name)


def loads(data: bytes) -> Any:
    """Unpickle what any release has saved."""
    return Unpickler(io.BytesIO(data)).load()
