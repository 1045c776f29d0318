"""What a process inherits from the process that starts it, and cannot be given later."""

from __future__ import annotations

import os
import resource
import stat
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessSetting:
    """Two settings are equal if a process started with one is as good as a process started with the other."""

    interpreter: str
    environment: dict[str, str]
    # The inode number distinguishes a folder from another folder that was made in its place.
    folder: tuple[str, int]
    packages: tuple[tuple[str, int, int], ...]
    cores: frozenset[int]
    limits: dict[str, tuple[int, int]]
    niceness: int
    umask: str

    @classmethod
    def of_a_child(cls, environment: dict[str, str]) -> ProcessSetting:
        """Return what a child that is started now would inherit. Raises ``OSError`` if the working directory is gone."""
        limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        return cls(
            sys.executable,
            environment,
            (os.getcwd(), os.stat(".").st_ino),
            package_marks(sys.path),
            frozenset(os.sched_getaffinity(0)),
            {name: resource.getrlimit(getattr(resource, name)) for name in limits},
            os.getpriority(os.PRIO_PROCESS, 0),
            _umask(),
        )


def _umask() -> str:
    """Return the mask of new files' permissions, which the call that tells it would also change, for all threads."""
    with open("/proc/self/status") as status:
        return next((line for line in status if line.startswith("Umask:")), "")


def package_marks(import_path: list[str]) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when packages are installed or archives replaced: entries of the import path, with time and size.

    Only folders to which installers write count: others hold user code, which a warm parent does not import.
    """
    marks = []
    for path in import_path:
        try:
            found = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) or os.path.basename(path) in ("site-packages", "dist-packages"):
            marks.append((path, found.st_mtime_ns, found.st_size))
    return tuple(marks)
