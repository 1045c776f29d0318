"""Packages that import their names on first use, so that unused modules are not loaded and need not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's ``__getattr__``. ``homes`` maps each public name to the submodule that defines it."""

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find
