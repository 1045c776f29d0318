"""Finds files that only some machines have. A script that saves to a local disk continues there, but starts over elsewhere."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

# The limits of the search on each machine, in folder levels and files, and how many names a warning lists.
DEPTH = 2
MOST_ENTRIES = 5_000
MOST_NAMES = 3


def files_since(folder: str, named: Sequence[str], since: float) -> list[str] | None:
    """List files written since a time, in the script's folder and at the paths among its arguments, as the script names them.

    The script works in ``folder`` if this machine has it, else in the present folder. Hidden files, and files more than
    ``DEPTH`` folders down, are left out. Returns None if there are too many files.
    """
    base = folder if folder and os.path.isdir(folder) else os.getcwd()
    found: set[str] = set()
    looked = 0
    paths = [".", *(name for name in named if not name.startswith("-") and os.path.exists(os.path.join(base, name)))]
    for path in paths:
        for file in _files(os.path.join(base, path), DEPTH):
            looked += 1
            if looked > MOST_ENTRIES:
                return None
            try:
                changed = os.stat(file).st_mtime
            except OSError:
                continue
            if changed >= since:
                found.add(os.path.relpath(file, base) if not os.path.isabs(path) else file)
    return sorted(found)


def _files(path: str, depth: int) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    try:
        with os.scandir(path) as entries:
            seen = list(itertools.islice(entries, MOST_ENTRIES + 1))
    except OSError:
        return
    for entry in seen:
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_file():
            yield entry.path
        elif depth > 1 and entry.is_dir():
            yield from _files(entry.path, depth - 1)


def describe_scattered(found: Mapping[str, Sequence[str] | None]) -> str:
    """Say which files only some machines have; empty if all have the same. ``found``: files by machine, None if unknown."""
    known = {place: names for place, names in found.items() if names is not None}
    if len(known) < len(found):
        return ""
    everything = sorted(set().union(*known.values()))
    scattered = []
    for name in everything:
        having = [place for place, names in known.items() if name in names]
        if len(having) < len(known):
            scattered.append(f"{name} is on {', '.join(having)} only")
    if not scattered:
        return ""
    more = f"; and {len(scattered) - MOST_NAMES} more" if len(scattered) > MOST_NAMES else ""
    return (
        f"the script starts again, but {'; '.join(scattered[:MOST_NAMES])}{more}. If it goes on from there, ranks elsewhere "
        "begin at another place: have it save where all machines read the same"
    )
