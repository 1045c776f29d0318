"""Chooses the columns to read: by name, or by a pattern that their names match."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# A string is a name and never a pattern, so that a column "a.b" is not taken for one.
Columns = Sequence[str | re.Pattern[str]] | None


def choose_columns(
    columns: Sequence[str | re.Pattern[str]], known: Sequence[str], trouble: Callable[[str], str]
) -> list[str]:
    """Return the requested columns, each once. A pattern stands for the columns of ``known`` whose whole name it matches.

    trouble: returns why a column cannot be read, or nothing. Patterns leave such a column out; naming it raises ValueError. So
    do unknown names and patterns that match nothing.
    """
    if isinstance(columns, (str, re.Pattern)) or not isinstance(columns, Sequence):
        raise ValueError(f"columns must be a list of names, not {columns!r}")
    chosen: list[str] = []
    for column in columns:
        if isinstance(column, re.Pattern):
            matching = [name for name in known if column.fullmatch(name)]
            readable = [name for name in matching if not trouble(name)]
            if not readable:
                found = f"only {', '.join(matching)}, which cannot be made into a tensor" if matching else "no column"
                raise ValueError(f"columns: {column.pattern!r} matches {found} of {', '.join(known)}")
            chosen += readable
        elif not isinstance(column, str):
            raise ValueError(f"columns must be names and compiled patterns, not {column!r}")
        elif column not in known:
            raise ValueError(f"columns: {column!r} is not in the dataset, which has {', '.join(known)}")
        elif found := trouble(column):
            raise ValueError(f"columns: {column!r} is {found}; give a transform=")
        else:
            chosen.append(column)
    return list(dict.fromkeys(chosen))
