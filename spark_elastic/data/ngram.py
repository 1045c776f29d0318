"""``NGram``: windows of consecutive rows by their timestamps, with the columns that each row of a window has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from spark_elastic._integers import whole_number
from spark_elastic._saved_names import saved_as

Fields = Sequence[str | re.Pattern[str]]


@saved_as("spark_elastic.data")
class NGram:
    """Windows of consecutive rows for ``ParquetLoader(ngram=…)``, with Petastorm's arguments.

        NGram({-1: ["speed", "image"], 0: ["speed"]}, delta_threshold=100, timestamp_field="milliseconds")

    A window lies within one row group, whose rows have to be in the order of their timestamps. ``filters=`` and ``predicate=``
    are applied first. A batch has the column "speed" as [windows, 2, …] and "image" as [windows, 1, …]: one entry of the second
    dimension for each offset that names the column, in ascending order.

    Args:
        fields: the columns of each row of a window, by the row's offset: names, and compiled patterns of whole names. Missing
            offsets between the smallest and the largest are rows of the window without columns.
        delta_threshold: the largest allowed difference between the timestamps of consecutive rows, 0 or above.
        timestamp_field: the column of timestamps: numbers, or times, which count nanoseconds. It need not be among the fields.
        timestamp_overlap: whether windows may overlap. If not, a window's first timestamp is above the last timestamp of the
            window before it.

    Raises ValueError for arguments that do not fit.
    """

    def __init__(
        self,
        fields: Mapping[int, Fields],
        delta_threshold: float,
        timestamp_field: str,
        timestamp_overlap: bool = True,
    ) -> None:
        """Check the arguments, and store the fields by ascending offset. Raises ValueError for arguments that do not fit."""
        if not isinstance(fields, Mapping) or not fields:
            raise ValueError(f"fields must be a dict of lists of columns by offset, not {fields!r}")
        for offset, columns in fields.items():
            whole_number("the offset of each list of fields", offset)
            if not isinstance(columns, (list, tuple)) or not all(isinstance(c, (str, re.Pattern)) for c in columns):
                raise ValueError(f"fields[{offset}] must be a list of names and compiled patterns, not {columns!r}")
        if not any(fields.values()):
            raise ValueError("fields must name at least one column")
        if not isinstance(delta_threshold, (int, float, np.number)) or isinstance(delta_threshold, bool):
            raise ValueError(f"delta_threshold must be a number, not {delta_threshold!r}")
        if not delta_threshold >= 0:  # NaN, too
            raise ValueError(f"delta_threshold must be 0 or above, not {delta_threshold!r}")
        if not isinstance(timestamp_field, str):
            raise ValueError(f"timestamp_field must be the name of a column, not {timestamp_field!r}")
        if not isinstance(timestamp_overlap, bool):
            raise ValueError(f"timestamp_overlap must be True or False, not {timestamp_overlap!r}")
        self.fields = {int(offset): list(fields[offset]) for offset in sorted(fields)}
        self.delta_threshold = delta_threshold
        self.timestamp_field = timestamp_field
        self.timestamp_overlap = timestamp_overlap

    @property
    def length(self) -> int:
        """The number of rows of a window."""
        return max(self.fields) - min(self.fields) + 1

    @property
    def columns(self) -> list[str | re.Pattern[str]]:
        """The names and patterns of all offsets, without duplicates."""
        return list(dict.fromkeys(column for columns in self.fields.values() for column in columns))

    def describe(self) -> str:
        """Describe the windows, apart from their columns, for a loader's saved position."""
        apart = f"{self.length} rows, {self.timestamp_field!r} at most {self.delta_threshold} apart"
        return apart if self.timestamp_overlap else f"{apart}, without overlap"

    def starts(self, times: np.ndarray) -> np.ndarray:
        """Return the first row of each window in rows with these timestamps: int64, ascending.

        Raises ValueError if there are enough rows for a window, but not in the order of their timestamps.
        """
        last = len(times) - self.length
        if last < 0:
            return np.zeros(0, np.int64)
        steps = np.diff(times)
        if not (steps >= 0).all():  # NaN, too
            row = int(np.argmin(steps >= 0))
            raise ValueError(f"{self.timestamp_field!r} must not fall, but is {times[row]}, then {times[row + 1]}")
        gaps = np.concatenate([[0], np.cumsum(steps.astype(np.float64) > self.delta_threshold)])
        found = np.flatnonzero(gaps[self.length - 1 :] == gaps[: last + 1])
        return found if self.timestamp_overlap else self._apart(times, found)

    def _apart(self, times: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Drop windows that begin at or before the end of the last window that was kept."""
        kept = []
        begins = times[starts]
        place = 0
        while place < len(starts):
            kept.append(starts[place])
            end = times[starts[place] + self.length - 1]
            place = int(np.searchsorted(begins, end, side="right"))
        return np.array(kept, np.int64)

    def columns_at(self, known: Sequence[str]) -> dict[str, np.ndarray]:
        """Return for each column the rows of a window that have it, counted from its first, int64. ``known``: existing columns.

        Raises ValueError for names and patterns that match no column.
        """
        found: dict[str, list[int]] = {}
        for offset, columns in self.fields.items():
            named: list[str] = []
            for column in columns:
                matching = [name for name in known if name == column or _matches(column, name)]
                if not matching:
                    raise ValueError(f"ngram: there is no column {column!r} among {', '.join(known)}")
                named += matching
            for name in dict.fromkeys(named):
                found.setdefault(name, []).append(offset - min(self.fields))
        return {name: np.array(rows, np.int64) for name, rows in found.items()}


def _matches(column: str | re.Pattern[str], name: str) -> bool:
    return isinstance(column, re.Pattern) and column.fullmatch(name) is not None
