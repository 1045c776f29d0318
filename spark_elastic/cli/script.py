"""What spark-elastic run has called in the workers: a script, whose text travels, or a function of a module."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cloudpickle


@dataclass(frozen=True)
class Script:
    """A Python file. Called, it runs as by ``python path arguments``; modules beside it have to be on the executors, too."""

    path: str
    source: bytes
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, os.path.dirname(self.path))
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        sys.modules["__main__"] = module
        try:
            exec(compile(self.source, self.path, "exec"), module.__dict__)
        except SystemExit as end:
            if end.code:
                raise


@dataclass(frozen=True)
class Function:
    """A function without arguments; what follows ``--`` is in ``sys.argv``."""

    function: Callable[[], object]
    name: str
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        sys.argv = [self.name, *self.arguments]
        self.function()


def find_target(target: str, arguments: Sequence[str]) -> Script | Function:
    """Find a script, or ``module:function``. Raises ``ValueError`` where there is neither."""
    path = Path(target)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise ValueError(f"script {target!r} does not exist")
        return Script(str(path.resolve()), path.read_bytes(), tuple(arguments))
    name, colon, attribute = target.partition(":")
    if not colon:
        raise ValueError(f"the target must be a script or module:function, not {target!r}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
        function = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target!r} cannot be imported: {error}") from error
    file = module.__file__ or ""
    if file and not any(
        Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")
    ):
        cloudpickle.register_pickle_by_value(
            sys.modules[name.partition(".")[0]]
        )  # the executors may have no copy of it
    return Function(function, target, tuple(arguments))
