"""Finds files that only some machines have: a script that saves to its own machine goes on there, and begins anew elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

# What is looked at, and named, of each machine.
DEPTH = 2
MOST_ENTRIES = 1_000
MOST_NAMES = 3


def files_since(folder: str, named: Sequence[str], since: float) -> list[str]:
    """List files written since a time, in the present folder and at the paths that the script was given, as it names them.

    ``folder`` is where the script works if it is there, else the present folder. Hidden files and what lies deep is left out.
    """
    base = folder if folder and os.path.isdir(folder) else os.getcwd()
    found: set[str] = set()
    paths = [".", *(name for name in named if not name.startswith("-") and os.path.exists(os.path.join(base, name)))]
    for path in paths:
        for file in _files(os.path.join(base, path), DEPTH):
            try:
                changed = os.stat(file).st_mtime
            except OSError:
                continue
            if changed >= since:
                found.add(os.path.relpath(file, base) if not os.path.isabs(path) else file)
            if len(found) == MOST_ENTRIES:
                return sorted(found)
    return sorted(found)


def _files(path: str, depth: int) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    try:
        with os.scandir(path) as entries:
            seen = [entry for entry, _ in zip(entries, range(MOST_ENTRIES), strict=False)]
    except OSError:
        return
    for entry in seen:
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_file():
            yield entry.path
        elif depth > 1 and entry.is_dir():
            yield from _files(entry.path, depth - 1)


def describe_scattered(found: Mapping[str, Sequence[str]]) -> str:
    """Say which files only some places have; empty where all have the same. ``found``: the files of each place."""
    everything = sorted(set().union(*found.values())) if found else []
    scattered = []
    for name in everything:
        having = [place for place, names in found.items() if name in names]
        if len(having) < len(found):
            scattered.append(f"{name} is on {', '.join(having)} only")
    if not scattered:
        return ""
    more = f"; and {len(scattered) - MOST_NAMES} more" if len(scattered) > MOST_NAMES else ""
    return (
        f"the script starts again, but {'; '.join(scattered[:MOST_NAMES])}{more}. If it goes on from there, ranks elsewhere "
        "begin at another place: have it save where all machines read the same"
    )
