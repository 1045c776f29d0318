"""Turns an engine of rows into an engine of windows, which a loader then counts, orders and shares out like rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from spark_elastic.data.columns import Column, Ragged, Rows, changed
from spark_elastic.data.engine import Engine, Reading
from spark_elastic.data.ngram import NGram
from spark_elastic.data.source import Source, each_file
from spark_elastic.errors import DataError


class WindowFinder:
    """Finds the windows of a row group: reads the timestamps of the rows that pass the filters.

    Raises ValueError for a column that holds no timestamps.
    """

    def __init__(self, ngram: NGram, reading: Reading) -> None:
        self.ngram = ngram
        self.reading = reading
        manifest = reading.manifest
        types = {field.name: field.type for field in manifest.schema}
        kind = types.get(ngram.timestamp_field)
        if kind is None:
            raise ValueError(
                f"timestamp_field={ngram.timestamp_field!r} is not in the files, which have {', '.join(types)}"
            )
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_timestamp(kind)):
            raise ValueError(f"timestamp_field={ngram.timestamp_field!r} is {kind}, neither numbers nor times")
        for name, length in manifest.list_lengths:
            if length is None and name in ngram.columns and reading.transform is None:
                raise ValueError(
                    f"ngram: {name!r} has lists of several lengths, which cannot be stacked; give a transform= that pads them"
                )

    @property
    def key(self) -> str | None:
        """Identifies windows and filters, equally in all processes; None if the filters cannot be identified."""
        rows = "" if self.reading.row_filter is None else self.reading.row_filter.key
        text = f"{rows} {self.ngram.describe()}"
        return None if rows is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def count(self) -> bytes:
        """Count the windows of each row group. Returns the bytes of int64 [row groups]. Reads the dataset; raises DataError."""
        manifest = self.reading.manifest
        counts = np.zeros(len(manifest), "<i8")

        def count_file(source: Source, groups: list[int]) -> None:
            for group in groups:
                counts[group] = len(self.starts(source, group))

        each_file(manifest, self.reading.locations, count_file)
        return counts.tobytes()

    def starts(self, source: Source, group: int) -> np.ndarray:
        """Read the first row of each window of a row group: int64, among the rows that pass the filters. Raises DataError."""
        where = source.manifest.where(group)
        times = self._times(source, group, where)
        if self.reading.row_filter is not None:
            times = times[self.reading.row_filter.passing(source, group)]
        try:
            return self.ngram.starts(times)
        except ValueError as failure:
            raise DataError(f"{where}: {failure}") from failure

    def _times(self, source: Source, group: int, where: str) -> np.ndarray:
        name = self.ngram.timestamp_field
        batches = list(source.batches(group, [name], 65_536))
        if not batches:
            return np.zeros(0, np.int64)
        column = pa.Table.from_batches(batches).column(name)
        if column.null_count:
            raise DataError(f"{where}: the timestamps {name!r} have {column.null_count} nulls; a window has none")
        try:
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.timestamp("ns"))
            times: np.ndarray = (column if pa.types.is_floating(column.type) else column.cast(pa.int64())).to_numpy()
        except pa.ArrowInvalid as failure:
            raise DataError(
                f"{where}: the timestamps {name!r} do not fit into 64-bit integers, dates into those of nanoseconds (1677 to "
                f"2262): {failure}"
            ) from failure
        return times


class NGramEngine:
    """Reads windows as rows: the columns of a window's rows are stacked in the second dimension. See ``Engine``.

    A window's position in its row group, as stored, is that of its first row.
    """

    def __init__(self, finder: WindowFinder, engine: Engine) -> None:
        self._finder = finder
        self._engine = engine
        self._name = finder.reading.manifest.where
        self._source = Source(finder.reading.manifest, finder.reading.locations)
        self._length = finder.ngram.length
        self.row_bytes = engine.row_bytes * len(finder.ngram.fields)

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        """Yield windows [start, stop) of a row group in their order; see ``Engine.read``."""
        starts = self._finder.starts(self._source, group)
        stop = min(stop, len(starts))
        if start >= stop:
            return
        held: Rows | None = None
        done = start
        for rows in self._engine.read(group, int(starts[start]), int(starts[stop - 1]) + self._length, chunk):
            held = rows if held is None else self._joined(held, rows)
            first = int(held.index[0])
            ready = int(np.searchsorted(starts[:stop], first + len(held) - self._length, side="right"))
            if ready > done:
                yield self._windows(held, np.arange(done, ready, dtype=np.int64), starts[done:ready] - first)
                done = ready
            if done == stop:
                return
            held = held[max(0, int(starts[done]) - first) :]
            held = held if len(held) else None

    def expect(self, group: int) -> None:
        """Begin to read a row group that will be needed soon, if the engine does so."""
        self._engine.expect(group)

    def close(self) -> None:
        """Close the files of both engines."""
        self._source.close()
        self._engine.close()

    def _windows(self, rows: Rows, index: np.ndarray, places: np.ndarray) -> Rows:
        try:
            columns_at = self._finder.ngram.columns_at(list(rows.columns))
        except ValueError as failure:
            raise DataError(f"{self._name(rows.group)}: {failure}") from failure
        columns: dict[str, Column] = {}
        for name, within in columns_at.items():
            columns[name] = self._dense(rows.group, name, rows.columns)[places[:, None] + within]
        return Rows(rows.group, index, rows.number[places], columns)

    def _joined(self, rows: Rows, more: Rows) -> Rows:
        columns: dict[str, Column] = {}
        difference = changed(more.columns, rows.columns)
        if difference:
            raise DataError(f"{self._name(rows.group)}: {difference}")
        for name in rows.columns:
            parts = [self._dense(rows.group, name, each.columns) for each in (rows, more)]
            if parts[0].shape[1:] != parts[1].shape[1:]:
                raise self._several_shapes(rows.group, name)
            columns[name] = np.concatenate(parts)
        index, number = (np.concatenate(pair) for pair in ((rows.index, more.index), (rows.number, more.number)))
        return Rows(rows.group, index, number, columns)

    def _dense(self, group: int, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        column = columns[name]
        if isinstance(column, Ragged):
            raise self._several_shapes(group, name)
        return column

    def _several_shapes(self, group: int, name: str) -> DataError:
        return DataError(
            f"{self._name(group)}: column {name!r} has values of several lengths, which cannot be stacked; give a transform= "
            "that pads them"
        )
