"""What a process inherits from the process that starts it, and cannot be given later."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import all_suffixes

# Names modules that users want imported ahead of the first job, too, separated by commas.
PRELOAD_VARIABLE = "SPARK_ELASTIC_PRELOAD"

Mark = tuple[str, int, int]  # a path, with the time and size of what is there


@dataclass(frozen=True)
class ProcessSetting:
    """Two settings are equal, and have the same ``repr``, if a process of the one is as good as a process of the other."""

    interpreter: str
    environment: dict[str, str]
    # The inode number distinguishes a folder from another folder that was made in its place.
    folder: tuple[str, int]
    packages: tuple[Mark, ...]
    cores: tuple[int, ...]
    limits: dict[str, tuple[int, int]]
    niceness: int
    umask: str

    @classmethod
    def of_a_child(cls, environment: dict[str, str]) -> ProcessSetting:
        """Return what a child that is started now would inherit. Raises ``OSError`` if the working directory is gone."""
        limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        return cls(
            sys.executable,
            dict(sorted(environment.items())),
            (os.getcwd(), os.stat(".").st_ino),
            package_marks(sys.path) + module_marks(preloaded(environment)),
            tuple(sorted(os.sched_getaffinity(0))),
            {name: resource.getrlimit(getattr(resource, name)) for name in limits},
            os.getpriority(os.PRIO_PROCESS, 0),
            _umask(),
        )


def _umask() -> str:
    """Return the mask of new files' permissions, which the call that tells it would also change, for all threads."""
    with open("/proc/self/status") as status:
        return next((line for line in status if line.startswith("Umask:")), "")


def preloaded(environment: Mapping[str, str]) -> list[str]:
    """Return the modules that the user has named to be imported ahead of the first job."""
    return [name.strip() for name in environment.get(PRELOAD_VARIABLE, "").split(",") if name.strip()]


def package_marks(import_path: list[str]) -> tuple[Mark, ...]:
    """Return what changes when packages are installed or archives replaced: entries of the import path, with time and size.

    Of a folder that is not made for packages, only the metadata of those that were installed there count (``pip install
    --target``): its other files are user code, which a warm parent does not import.
    """
    marks: list[Mark] = []
    for path in (path or os.curdir for path in import_path):
        if os.path.isfile(path) or os.path.basename(path) in ("site-packages", "dist-packages"):
            marks += _marks([path])
        else:
            marks += _marks_in(path, (".dist-info", ".egg-info"))
    return tuple(marks)


def module_marks(modules: list[str]) -> tuple[Mark, ...]:
    """Return what changes when the code of modules changes: the files of each module's folder, and of the folders above it.

    Files in folders further below do not count: looking for them could take longer than the first step.
    """
    marks: set[Mark] = set()
    for module in modules:
        package, *names = module.split(".")
        try:
            spec = importlib.util.find_spec(package)  # imports nothing, as this name has no dots
        except Exception:  # whatever a finder that the user has installed raises
            spec = None
        if spec is None:
            continue
        if spec.origin and os.path.isfile(spec.origin):
            marks.update(_marks([spec.origin]))
        for folder in spec.submodule_search_locations or ():
            for depth in range(len(names) + 1):
                marks.update(_marks_in(os.path.join(folder, *names[:depth]), tuple(all_suffixes())))
    return tuple(sorted(marks))


def _marks_in(folder: str, ends: tuple[str, ...]) -> list[Mark]:
    """Return the marks of a folder's entries with such names, except hidden ones, such as an editor's lock ``.#module.py``."""
    names: list[str] = []
    with suppress(OSError):  # no folder is there
        names = sorted(name for name in os.listdir(folder) if name.endswith(ends) and not name.startswith("."))
    return _marks(os.path.join(folder, name) for name in names)


def _marks(paths: Iterable[str]) -> list[Mark]:
    """Return the marks of what is there: not of links that lead nowhere, nor of what vanishes meanwhile."""
    marks = []
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            marks.append((path, found.st_mtime_ns, found.st_size))
    return marks
