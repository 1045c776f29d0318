"""The rows that a reader holds: one window for each lane that it reads, side by side in one array per column.

With one array per column, one indexed copy gathers a block of batches, however many lanes it draws from. Rows are shuffled when
their window is read, while they are in the processor's cache, so that a block copies runs of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from spark_elastic.data.columns import Column, Ragged, Rows, all_dense, as_ragged, changed, join
from spark_elastic.data.engine import Engine
from spark_elastic.data.order import EpochOrder, Piece
from spark_elastic.errors import DataError

_SLOTS = 4

# The columns that ``with_row_ids=True`` adds.
ROW_IDS = ("_row_group", "_row")


@dataclass(slots=True)
class _Cursor:
    """The reading position in a lane: the open iterator, its row group, the next row there, and rows read but not placed."""

    rows: Iterator[Rows]
    group: int
    next: int
    spare: Rows | None = None


@dataclass(slots=True)
class _Lane:
    slot: int
    window: int = -1
    cursor: _Cursor | None = None
    ragged: dict[str, Ragged] = field(default_factory=dict)


class WindowStore:
    """Holds at most one window per lane: memory for ``spec.window`` rows times the lanes in use, plus ``chunk`` rows each.

    If all lanes have fewer rows than a window, there is memory for these. Not thread-safe: it belongs to the reader thread
    while there is one. Every window is checked, row by row, against the rows that the order assigns to it.
    """

    def __init__(
        self, order: EpochOrder, engine: Engine, name: Callable[[int], str], *, chunk: int, row_ids: bool = False
    ) -> None:
        self.order = order
        self._engine = engine
        self._name = name
        self._row_ids = row_ids
        self._chunk = chunk
        self._width = min(order.spec.window, int(order.lane_rows.max(initial=1)))
        lanes = order.spec.lanes
        self._lanes: dict[int, _Lane] = {}
        self._free: list[int] = []
        self._capacity = 0
        # The names of all columns, once rows have been read, the dense columns, and the names of the others.
        self._names: frozenset[str] | None = None
        self._columns: dict[str, np.ndarray] = {}
        self._ragged: set[str] = set()
        self._tickets = np.zeros(0, np.int64)
        self.resident = np.full(lanes, -1, np.int64)
        self._base = np.zeros(lanes, np.int64)
        self.windows_read = 0

    @property
    def bytes(self) -> int:
        """The size of the dense columns held."""
        return sum(column.nbytes for column in self._columns.values())

    def keep(self, lanes: Iterable[int]) -> None:
        """Drop the rows of all other lanes, which other ranks now read."""
        for lane in self._lanes.keys() - set(lanes):
            self._free.append(self._lanes.pop(lane).slot)
            self.resident[lane] = -1

    def load(self, lane: int, window: int) -> None:
        """Hold this window of the lane, reading it unless it is held already. Raises DataError."""
        if self.resident[lane] == window:
            return
        state = self._lanes.get(lane)
        if state is None:
            state = self._lanes[lane] = _Lane(self._slot())
        self.resident[lane] = -1
        start, stop = self.order.window_bounds(lane, window)
        parts: list[Rows] = []
        for piece in self.order.window_pieces(lane, window):
            parts += self._read(state, piece, lane)
        self._check(parts, lane, window, stop - start)
        given = self.order.window_order(lane, window)
        self._place(state, parts, given)
        # Each row carries its ticket, by which the rows delivered are compared with the rows assigned.
        base = state.slot * self._width
        tickets = np.empty(stop - start, np.int64)
        tickets[given] = np.arange(start, stop, dtype=np.int64) * self.order.spec.lanes + lane
        _arrange([tickets], given, self._tickets[base : base + stop - start])
        self._base[lane] = base - start
        state.window = window
        self.resident[lane] = window
        self.windows_read += 1

    def gather(
        self, lanes: np.ndarray, positions: np.ndarray, into: dict[str, np.ndarray], tickets: np.ndarray, at: int
    ) -> dict[str, Ragged]:
        """Copy rows of resident windows into rows ``at``… of preallocated columns; return those of ragged columns.

        tickets: receives the ticket of each copied row, kept beside the row since it was read.
        """
        rows = self._base[lanes] + positions
        stop = at + len(rows)
        self._tickets.take(rows, out=tickets[at:stop], mode="clip")
        for name, column in self._columns.items():
            column.take(rows, axis=0, out=into[name][at:stop], mode="clip")
        return {name: self._gather_ragged(name, lanes, rows) for name in self._ragged}

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """The shape of a row and the dtype of every dense column."""
        return {name: (column.shape[1:], column.dtype) for name, column in self._columns.items()}

    def close(self) -> None:
        """Drop the cursors, so that no file stays open. The rows are kept."""
        for state in self._lanes.values():
            state.cursor = None

    def _slot(self) -> int:
        if not self._free:
            grown = min(self._capacity + max(_SLOTS, self._capacity // 2), self.order.spec.lanes)
            self._free = list(range(grown - 1, self._capacity - 1, -1))
            self._capacity = grown
            rows = grown * self._width
            self._tickets = _grown(self._tickets, rows)
            self._columns = {name: _grown(column, rows) for name, column in self._columns.items()}
        return self._free.pop()

    def _read(self, state: _Lane, piece: Piece, lane: int) -> list[Rows]:
        cursor = state.cursor
        if cursor is None or cursor.group != piece.group or cursor.next > piece.start:
            place = int(self.order.place[piece.group])
            lane_end = int(self.order.cuts[lane] + self.order.lane_rows[lane]) - place
            index = int(np.searchsorted(self.order.starts, place))
            stop = min(lane_end, int(self.order.ends[index]) - place)
            rows = self._engine.read(piece.group, piece.start, stop, self._chunk)
            cursor = state.cursor = _Cursor(rows, piece.group, piece.start)
            if place + stop < self.order.cuts[lane] + self.order.lane_rows[lane]:
                self._engine.expect(int(self.order.groups[index + 1]))
        found = []
        while cursor.next < piece.stop:
            rows_read = cursor.spare if cursor.spare is not None else next(cursor.rows, None)
            cursor.spare = None
            if rows_read is None or not len(rows_read):
                raise DataError(
                    f"{self._name(piece.group)} ended before row {piece.stop}: the file is not the one listed"
                )
            skip = max(0, piece.start - cursor.next)
            end = min(len(rows_read), piece.stop - cursor.next)
            if skip < end:
                found.append(rows_read[skip:end])
            if end < len(rows_read):
                cursor.spare = rows_read[end:]
            cursor.next += end
        return found

    def _check(self, parts: list[Rows], lane: int, window: int, count: int) -> None:
        """Compare the rows that were read with those that the order assigns, so that a difference is never silent."""
        place = self.order.place
        got = [part.index + place[part.group] for part in parts]
        first = int(self.order.cuts[lane]) + self.order.window_bounds(lane, window)[0]
        rows = np.concatenate(got) if got else np.zeros(0, np.int64)
        if len(rows) != count or not np.array_equal(rows, np.arange(first, first + count, dtype=np.int64)):
            names = ", ".join(sorted({self._name(part.group) for part in parts}))
            raise DataError(f"rows delivered are not the rows assigned in {names}: {len(rows)} of {count}")

    def _place(self, state: _Lane, parts: list[Rows], given: np.ndarray) -> None:
        for part in parts:
            self._check_names(part)
        group = parts[0].group
        for name in parts[0].columns:
            self._put(state, name, [part.columns[name] for part in parts], group, given)
        if self._row_ids:
            groups = [np.full(len(part), part.group, np.int64) for part in parts]
            self._put_dense(state, "_row_group", groups, group, given)
            self._put_dense(state, "_row", [part.number for part in parts], group, given)

    def _check_names(self, part: Rows) -> None:
        if self._names is None:
            taken = set(ROW_IDS) & part.columns.keys() if self._row_ids else ()
            if taken:
                raise DataError(
                    f"{self._name(part.group)}: with_row_ids=True adds a column {min(taken)!r}, and there is one; rename it in a "
                    "transform=, or leave it out of columns="
                )
            self._names = frozenset(part.columns)
        difference = changed(part.columns, self._names)
        if difference:
            raise DataError(f"{self._name(part.group)}: {difference}")

    def _put(self, state: _Lane, name: str, pieces: list[Column], group: int, given: np.ndarray) -> None:
        """Hold the rows of one column; ``group`` names them in errors."""
        dense = None if name in self._ragged else all_dense(pieces)
        if dense is not None and self._put_dense(state, name, dense, group, given):
            return
        if name not in self._ragged:
            self._become_ragged(name)
        state.ragged[name] = as_ragged(join(pieces)).take(given)

    def _put_dense(self, state: _Lane, name: str, pieces: list[np.ndarray], group: int, given: np.ndarray) -> bool:
        """Write rows into the column's array. Return False if they are lists of other lengths than the rows before."""
        target = self._columns.get(name)
        if target is None:
            first = pieces[0]
            target = np.empty((self._capacity * self._width, *first.shape[1:]), first.dtype)
            self._columns[name] = target
        shapes = {piece.shape[1:] for piece in (*pieces, target)}
        if len(shapes) > 1:
            if any(piece.ndim != 2 for piece in (*pieces, target)):
                raise DataError(
                    f"{self._name(group)}: column {name!r} has rows of shapes {sorted(shapes)}; give a transform= that makes "
                    "them equal"
                )
            return False
        for piece in pieces:
            if piece.dtype != target.dtype:
                raise DataError(f"{self._name(group)}: column {name!r} is {piece.dtype}, before it was {target.dtype}")
        base = state.slot * self._width
        _arrange(pieces, given, target[base : base + len(given)])
        return True

    def _become_ragged(self, name: str) -> None:
        self._ragged.add(name)
        dense = self._columns.pop(name, None)
        if dense is None:
            return
        for lane, state in self._lanes.items():
            if self.resident[lane] >= 0:
                start, stop = self.order.window_bounds(lane, state.window)
                base = state.slot * self._width
                state.ragged[name] = as_ragged(dense[base : base + stop - start].copy())

    def _gather_ragged(self, name: str, lanes: np.ndarray, rows: np.ndarray) -> Ragged:
        used = np.unique(lanes)
        place = np.zeros(len(rows), np.int64)
        parts: list[Column] = []
        count = 0
        for lane in used:
            state = self._lanes[int(lane)]
            mine = np.flatnonzero(lanes == lane)
            parts.append(state.ragged[name].take(rows[mine] - state.slot * self._width))
            place[mine] = np.arange(count, count + len(mine))
            count += len(mine)
        return as_ragged(join(parts)).take(place)


def _arrange(pieces: list[np.ndarray], given: np.ndarray, target: np.ndarray) -> None:
    """Write rows into ``target`` in the order in which they will be delivered."""
    rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    rows.take(given, axis=0, out=target, mode="clip")


def _grown(array: np.ndarray, rows: int) -> np.ndarray:
    result = np.empty((rows, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result
