"""The default engine: decodes row groups with pyarrow, a chunk of rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from spark_elastic.data.column_choice import Columns, choose_columns
from spark_elastic.data.columns import Column, Rows
from spark_elastic.data.convert import convertible, from_transform, to_column
from spark_elastic.data.engine import Reading
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.source import Source
from spark_elastic.errors import DataError


def select_columns(manifest: Manifest, columns: Columns, *, transformed: bool) -> list[str]:
    """Return the columns to read: those requested, or else all that can become tensors, or with a transform all.

    Raises ValueError as ``choose_columns`` does, and DataError if files have two columns of the name of one to read.
    """
    schema = pa.schema([*manifest.schema, *manifest.partition_types.items()])
    names = schema.names  # a new list at each access
    types = dict(zip(names, schema.types, strict=True))

    def trouble(name: str) -> str:
        kind = types[name]
        return "" if transformed or convertible(kind) else f"{kind}, which cannot be made into a tensor"

    if columns is None:
        chosen = [field.name for field in schema if transformed or convertible(field.type)]
    else:
        chosen = choose_columns(columns, names, trouble)
    counts = Counter(names)
    twice = next((name for name in chosen if counts[name] > 1), None)
    if twice is not None:
        raise DataError(f"{manifest.name}: the files have several columns named {twice!r}; choose others by columns=")
    return chosen


def decoded_bytes(manifest: Manifest, columns: Sequence[str]) -> float:
    """Return the size of a decoded row of these columns in bytes, or 0 if types and footers do not determine it."""
    types = {**{field.name: field.type for field in manifest.schema}, **manifest.partition_types}
    lengths, total = dict(manifest.list_lengths), 0.0
    for name in columns:
        kind, count = types[name], lengths.get(name, 1) or 0
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        while pa.types.is_fixed_size_list(kind):
            kind, count = kind.value_type, count * kind.list_size
        if not count or not pa.types.is_primitive(kind):
            return 0.0
        total += count * kind.bit_width / 8
    return total


def open_engine(reading: Reading) -> ArrowEngine:
    """Make the engine for a dataset. Raises ValueError, TypeError and DataError for arguments that do not fit."""
    return ArrowEngine(reading)


class ArrowEngine:
    """Reads rows through pyarrow, with Petastorm's codecs if Petastorm wrote the dataset. A transform takes a pyarrow.Table."""

    def __init__(self, reading: Reading) -> None:
        manifest, columns, transform = reading.manifest, reading.columns, reading.transform
        if reading.options:
            raise ValueError("engine_options are for engine='petastorm', not 'arrow'")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be callable, not {transform!r}")
        self._decode: Callable[[pa.Table, str], pa.Table] | None = None
        if manifest.unischema:
            from spark_elastic.data.unischema import Decoder

            self._decode = decoder = Decoder(manifest.unischema, transformed=transform is not None)
            self._columns = decoder.select(columns, [*manifest.schema.names, *manifest.partition_types])
            self.row_bytes = decoder.row_bytes(self._columns)
        else:
            self._columns = select_columns(manifest, columns, transformed=transform is not None)
            if columns is None and not self._columns:
                raise ValueError(
                    f"no column of {manifest.name} has numbers ({manifest.schema.names}); give a transform="
                )
            self.row_bytes = decoded_bytes(manifest, self._columns)
        self._transform = transform
        self._filter = reading.row_filter
        self._manifest = manifest
        self._source = Source(manifest, reading.locations)

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        """Yield rows [start, stop) of a row group; see ``Engine.read``. Rows before ``start`` are not converted."""
        if start >= stop:
            return
        where = self._manifest.where(group)
        kept = self._filter.passing(self._source, group) if self._filter is not None else None
        end = stop if kept is None else int(kept[stop - 1]) + 1
        first = 0
        for batch in self._source.batches(group, self._columns, min(chunk, end)):  # rows after ``end`` are not decoded
            past = first + batch.num_rows
            if kept is None:
                low, high = max(first, start), min(past, stop)
                numbers = np.arange(low, high, dtype=np.int64)
            else:
                low, high = np.clip(np.searchsorted(kept, (first, past)), start, stop).tolist()
                numbers = kept[low:high]
            if low < high:
                table = _chosen(pa.Table.from_batches([batch]).select(self._columns), numbers - first)
                yield Rows(group, np.arange(low, high, dtype=np.int64), numbers, self._convert(table, where))
            first = past
            if first >= end:
                return

    def expect(self, group: int) -> None:
        """Do nothing: chunks are read when they are needed."""

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def _convert(self, table: pa.Table, where: str) -> dict[str, Column]:
        if self._decode is not None:
            table = self._decode(table, where)
        if self._transform is None:
            return {name: to_column(table.column(name), name, where) for name in table.column_names}
        rows = len(table)
        try:
            result = self._transform(table)
        except DataError:
            raise
        except Exception as failure:
            raise DataError(f"{where}: transform raised {type(failure).__name__}: {failure}") from failure
        return from_transform(result, rows, where)


def _chosen(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Return the given rows, which are in ascending order. They are copied only if rows between them are left out."""
    first, count = int(rows[0]), len(rows)
    return table.slice(first, count) if rows[-1] - first + 1 == count else table.take(pa.array(rows))
