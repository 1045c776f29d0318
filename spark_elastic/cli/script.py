"""What spark-elastic run calls in the workers: a script, whose text is sent along, a module, or a function in a module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import socket
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cloudpickle

from spark_elastic._text import brief


@dataclass(frozen=True)
class Script:
    """A Python file, run as by ``python path arguments``. Modules next to it have to be on the executors, too."""

    path: str
    source: bytes
    arguments: tuple[str, ...]
    folder: str

    def code(self) -> types.CodeType:
        """Compile the file. Raises ``ValueError`` if it is not valid Python."""
        try:
            return compile(self.source, self.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{self.path}, line {error.lineno}: {type(error).__name__}: {error.msg}") from error

    def __call__(self) -> None:
        """Run the file as ``__main__``."""
        _start_as(self.path, self.arguments, self.folder)
        sys.path.insert(0, os.path.dirname(self.path))
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        sys.modules["__main__"] = module
        with _as_main():
            exec(self.code(), module.__dict__)


@dataclass(frozen=True)
class Module:
    """A module that executors can import, run as by ``python -m name arguments``."""

    name: str
    arguments: tuple[str, ...]
    folder: str

    def __call__(self) -> None:
        """Run the module as ``__main__``."""
        _start_as(self.name, self.arguments, self.folder)
        sys.path.insert(0, os.getcwd())
        with _as_main():
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Function:
    """A function without arguments. It finds the arguments after ``--`` in ``sys.argv``."""

    function: Callable[[], object]
    name: str
    arguments: tuple[str, ...]
    folder: str

    def __call__(self) -> None:
        """Call the function."""
        _start_as(self.name, self.arguments, self.folder)
        self.function()


def _start_as(name: str, arguments: Sequence[str], folder: str) -> None:
    enter_folder(folder)
    sys.argv = [name, *arguments]


@contextmanager
def _as_main() -> Iterator[None]:
    """Treat a ``SystemExit`` that reports no failure as a normal end."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


def enter_folder(folder: str) -> None:
    """Change to the folder in which the command was given, if this machine has it: relative paths refer to it."""
    try:
        os.chdir(folder)
    except OSError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            print(
                f"spark-elastic: {folder}, where the command was given, cannot be entered on {socket.gethostname()} "
                f"({error.strerror}), so relative paths are in {os.getcwd()} there: give absolute paths that all machines share",
                file=sys.stderr,
                flush=True,
            )


def find_target(target: str, arguments: Sequence[str], *, is_module: bool = False) -> Script | Module | Function:
    """Find a script, ``module:function``, or with ``is_module`` a module. Raises ``ValueError`` if missing or not Python."""
    path, folder = Path(target), os.getcwd()
    if is_module:
        return _find_module(target, tuple(arguments), folder)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise ValueError(f"script {target!r} does not exist")
        script = Script(str(path.resolve()), path.read_bytes(), tuple(arguments), folder)
        script.code()  # so that a syntax error is reported before anything is started
        return script
    name, colon, attribute = target.partition(":")
    if not colon:
        raise ValueError(f"the target must be a script, module:function, or -m and a module, not {target!r}")
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
        function = getattr(module, attribute)
    except Exception as error:  # whatever the module raises
        kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
        raise ValueError(f"{target!r} cannot be imported: {kind}{error}") from error
    if not callable(function):
        raise ValueError(f"{target!r} is no function, but {brief(function)}")
    file = module.__file__ or ""
    if file and not any(
        Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")
    ):
        # The executors may not have a copy of the module.
        cloudpickle.register_pickle_by_value(sys.modules[name.partition(".")[0]])
    return Function(function, target, tuple(arguments), folder)


def _find_module(name: str, arguments: tuple[str, ...], folder: str) -> Module:
    sys.path.insert(0, folder)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise ValueError(f"module {name!r} cannot be imported: {error}") from error
    finally:
        sys.path.remove(folder)
    if found is None:
        raise ValueError(f"module {name!r} does not exist, neither in {folder} nor among what is installed")
    return Module(name, arguments, folder)
