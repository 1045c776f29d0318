"""Columns of numbers as numpy arrays: dense ones, and lists of different lengths."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of different lengths: row i is values[starts[i] : starts[i] + lengths[i]].

    values: [total], may hold more than the rows; starts, lengths: int64 [rows].
    """

    values: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: slice) -> Ragged:
        return Ragged(self.values, self.starts[rows], self.lengths[rows])

    @property
    def is_even(self) -> bool:
        """Whether all lists have one length."""
        return bool((self.lengths == self.lengths[:1]).all())

    def take(self, rows: np.ndarray) -> Ragged:
        """Return the given rows in that order, with their values copied together."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        shift = np.repeat(starts - (ends - lengths), lengths)
        return Ragged(self.values[shift + np.arange(total, dtype=np.int64)], ends - lengths, lengths)


Column = np.ndarray | Ragged


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of one row group, decoded.

    index: int64 [rows], each row's place among the row group's rows that pass the filters.
    number: int64 [rows], each row's place in the row group as stored.
    """

    group: int
    index: np.ndarray
    number: np.ndarray
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice) -> Rows:
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Rows(self.group, self.index[rows], self.number[rows], columns)


def changed(now: Collection[str], before: Collection[str]) -> str:
    """Describe how columns differ from those of earlier rows; empty if they do not."""
    if set(now) == set(before):
        return ""
    return (
        f"these rows have the columns {sorted(now)}, the rows before them {sorted(before)}; a transform= has to make the same "
        "columns of all rows"
    )


def all_dense(columns: Sequence[Column]) -> list[np.ndarray] | None:
    """Return the columns if all of them are dense, else None."""
    dense = [column for column in columns if isinstance(column, np.ndarray)]
    return dense if len(dense) == len(columns) else None


def as_ragged(column: Column) -> Ragged:
    """Return a dense [rows, n] column as lists of equal length."""
    if isinstance(column, Ragged):
        return column
    rows, length = column.shape
    return Ragged(column.reshape(-1), np.arange(rows, dtype=np.int64) * length, np.full(rows, length, np.int64))


def join(parts: Sequence[Column]) -> Column:
    """Concatenate columns. Lists of one length joined with lists of several become lists of several."""
    if len(parts) == 1:
        return parts[0]
    dense = all_dense(parts)
    if dense is not None and len({part.shape[1:] for part in dense}) == 1:
        return np.concatenate(dense)
    ragged = [as_ragged(part) for part in parts]
    packed = [part.take(np.arange(len(part), dtype=np.int64)) for part in ragged]
    bases = np.cumsum([0] + [len(part.values) for part in packed[:-1]])
    return Ragged(
        np.concatenate([part.values for part in packed]),
        np.concatenate([part.starts + base for part, base in zip(packed, bases, strict=True)]),
        np.concatenate([part.lengths for part in packed]),
    )
