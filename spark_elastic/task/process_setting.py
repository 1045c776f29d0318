"""What a process inherits from the one that starts it, and cannot be given later."""

from __future__ import annotations

import os
import resource
import stat
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessSetting:
    """Two are equal if a process that was started with the one is as good as one that is started with the other."""

    interpreter: str
    environment: dict[str, str]
    # The inode number distinguishes a folder from another one that was made in its place.
    folder: tuple[str, int]
    packages: tuple[tuple[str, int, int], ...]
    cores: frozenset[int]
    limits: dict[str, tuple[int, int]]

    @classmethod
    def of_a_child(cls, environment: dict[str, str]) -> ProcessSetting:
        """Return what a child gets that is started now. Raises ``OSError`` where the working directory is gone."""
        limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        return cls(
            sys.executable,
            environment,
            (os.getcwd(), os.stat(".").st_ino),
            package_marks(sys.path),
            frozenset(os.sched_getaffinity(0)),
            {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        )


def package_marks(import_path: list[str]) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when packages are installed or archives replaced: the places on the import path, with time and size.

    Of folders only those that installers write to count, since others hold user code, which a warm parent does not import.
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
