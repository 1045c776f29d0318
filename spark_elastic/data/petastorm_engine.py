"""Reads row groups through Petastorm's own reader workers: its codecs, TransformSpec, pools and caches.

Petastorm chooses its own order and does not reveal where a row came from. Here its workers read single row groups on request,
in the order that the loader needs, and mark each row with its row group and its position there. What arrives is compared with
what was requested. Rows that do not pass the filters are dropped before decoding. Fields that are null in the files become
None, whereas Petastorm makes some of them NaN. Needs petastorm 0.12 and its dependencies (the extra ``petastorm``).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace

import cloudpickle
import numpy as np
import pyarrow as pa

from spark_elastic._text import without_secrets
from spark_elastic.data.arrow_engine import select_columns
from spark_elastic.data.column_choice import Columns
from spark_elastic.data.columns import Column, Ragged, Rows
from spark_elastic.data.convert import convertible, to_column
from spark_elastic.data.engine import Reading
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.petastorm_workers import PIECE, ROW, PieceReader, open_reader, reads
from spark_elastic.data.source import Source
from spark_elastic.data.unischema import Decoder
from spark_elastic.errors import DataError

logger = logging.getLogger("spark_elastic")

_OPTIONS = (
    "reader_pool_type",
    "workers_count",
    "results_queue_size",
    "cache_type",
    "cache_location",
    "cache_size_limit",
    "cache_row_size_estimate",
    "cache_extra_settings",
    "hdfs_driver",
    "zmq_copy_buffers",
)


def open_engine(reading: Reading) -> PetastormEngine:
    """Make the engine for a dataset. Raises for arguments that do not fit."""
    return PetastormEngine(reading)


class PetastormEngine:
    """Reads row groups with Petastorm's workers.

    columns: field names, or None for all. transform: a petastorm TransformSpec; it may not change the number of rows.
    options: arguments of ``petastorm.make_reader`` such as reader_pool_type, workers_count and cache_type. Row groups are held
    whole, because Petastorm delivers them whole. Workers start with the first read and stop with ``close``.
    """

    # 0, because Petastorm's schemas do not determine it.
    row_bytes = 0.0

    def __init__(self, reading: Reading) -> None:
        manifest, transform = reading.manifest, reading.transform
        unknown = sorted(set(reading.options or {}) - set(_OPTIONS))
        if unknown:
            raise ValueError(f"engine_options must be among {', '.join(_OPTIONS)}, not {', '.join(unknown)}")
        if transform is not None and not hasattr(transform, "edit_fields"):
            raise ValueError("engine='petastorm' takes a petastorm.transform.TransformSpec as its transform=")
        if len(reading.locations) > 1:
            raise ValueError("engine='petastorm' reads one URL; engine='arrow' reads a list of them")
        self._manifest = manifest
        self._columns = _select(manifest, reading.columns, transformed=transform is not None)
        if not self._columns and reading.columns is None:
            raise ValueError(
                f"no column of {manifest.name} has numbers that Petastorm reads ({manifest.schema.names}); give a "
                "transform=, or use engine='arrow'"
            )
        self._reading = replace(reading, options=dict(reading.options or {}))
        self._filter = reading.row_filter
        self._source = Source(manifest, reading.locations)
        self._location = reading.locations[0]
        self._process = os.getpid()
        self._reader: PieceReader | None = None
        self._piece_of: dict[int, int] = {}
        self._group_of: dict[int, int] = {}
        self._asked: set[int] = set()
        self._arrived: dict[int, pa.Table | list[dict[str, object]]] = {}
        # The requested rows of each row group, if a filter chooses rows.
        self._kept: dict[int, np.ndarray] = {}

    def expect(self, group: int) -> None:
        """Begin to read a row group that will be needed soon."""
        reader = self._start()
        if group not in self._asked and group in self._piece_of:
            self._source.check(group)
            if self._filter is not None:
                self._kept[group] = self._filter.passing(self._source, group)
            self._asked.add(group)
            reader.ask(self._piece_of[group], self._kept.get(group))

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        """Yield rows [start, stop) of a row group; see ``Engine.read``."""
        rows = self._rows(group)
        for first in range(start, min(stop, len(rows)), chunk):
            yield rows[first : min(first + chunk, stop)]

    def close(self) -> None:
        """Stop the workers and wait for them."""
        reader, self._reader = self._reader, None
        self._asked.clear()
        self._arrived.clear()
        self._source.close()
        if reader is not None and self._process == os.getpid():
            reader.stop()
            reader.join()

    def _rows(self, group: int) -> Rows:
        self.expect(group)
        if group not in self._piece_of:
            raise DataError(f"{self._manifest.where(group)}: Petastorm does not list this row group")
        assert self._reader is not None
        while group not in self._arrived:
            try:
                result = self._reader.answer()
            except Exception as failure:
                self._reader.abandon()
                self._reader = None
                self._asked.clear()
                told = without_secrets(failure, self._manifest.urls[0])
                raise DataError(f"Petastorm's workers failed: {told}") from failure
            piece = int(result.column(PIECE)[0].as_py()) if isinstance(result, pa.Table) else result[0][PIECE]
            self._arrived[self._group_of[piece]] = result
        self._source.check(group)  # the workers have opened the file by themselves
        self._asked.discard(group)
        return self._convert(group, self._arrived.pop(group))

    def _convert(self, group: int, result: pa.Table | list[dict[str, object]]) -> Rows:
        where = self._manifest.where(group)
        kept = self._kept.pop(group, None)
        index = np.arange(self._manifest[group].rows, dtype=np.int64) if kept is None else kept
        if isinstance(result, pa.Table):
            numbers, columns = self._from_table(result, where)
        else:
            numbers, columns = self._from_dicts(result, where)
        if len(numbers) != len(index):
            raise DataError(f"{where}: Petastorm delivered {len(numbers)} rows of {len(index)}")
        if not np.array_equal(numbers, np.arange(len(index))):
            raise DataError(f"{where}: Petastorm delivered its rows out of order")
        if self._reading.transform is None:
            missing = [name for name in self._columns if name not in columns]
            if missing:
                raise DataError(f"{where}: Petastorm delivered no column {missing[0]!r}; use engine='arrow'")
            columns = {name: columns[name] for name in self._columns}
        return Rows(group, np.arange(len(index), dtype=np.int64), index, columns)

    def _from_table(self, table: pa.Table, where: str) -> tuple[np.ndarray, dict[str, Column]]:
        assert self._reader is not None
        columns: dict[str, Column] = {}
        for name in table.column_names:
            if name not in (PIECE, ROW) and convertible(table.schema.field(name).type):
                column = to_column(table.column(name), name, where)
                shape = tuple(self._reader.schema.fields[name].shape or ())
                if len(shape) > 1 and isinstance(column, np.ndarray):
                    column = column.reshape(len(table), *shape)
                columns[name] = column
        return table.column(ROW).to_numpy(), columns

    def _from_dicts(self, rows: list[dict[str, object]], where: str) -> tuple[np.ndarray, dict[str, Column]]:
        assert self._reader is not None
        columns: dict[str, Column] = {}
        for name, field in self._reader.schema.fields.items():
            kind = field.numpy_dtype
            if not (isinstance(kind, type) and issubclass(kind, (np.number, np.bool_))) or name not in rows[0]:
                continue
            values = [row[name] for row in rows]
            nulls = sum(value is None for value in values)
            if nulls:
                raise DataError(
                    f"{where}: column {name!r} has {nulls} nulls; fill them with transform= or drop them with filters="
                )
            arrays = [np.asarray(value, kind) for value in values]
            if len({array.shape for array in arrays}) == 1:
                columns[name] = np.stack(arrays)
            elif all(array.ndim == 1 for array in arrays):
                lengths = np.array([len(array) for array in arrays], np.int64)
                columns[name] = Ragged(np.concatenate(arrays), np.cumsum(lengths) - lengths, lengths)
            else:
                raise DataError(f"{where}: column {name!r} has values of several shapes; give a TransformSpec")
        return np.array([row[ROW] for row in rows], np.int64), columns

    def _cache_key(self) -> str:
        """Return a prefix that identifies cache entries, because Petastorm's own keys contain only a row group's location."""
        rows = self._filter.text if self._filter is not None else ""
        made_of = cloudpickle.dumps((self._manifest.fingerprint, self._columns, rows, self._reading.transform))
        return hashlib.blake2b(made_of, digest_size=16).hexdigest()

    def _start(self) -> PieceReader:
        if self._reader is not None and self._process == os.getpid():
            return self._reader
        self._process = os.getpid()
        self._asked.clear()
        self._arrived.clear()
        self._reader = open_reader(self._reading, self._columns, self._cache_key)
        places = {(group.path, group.ordinal): index for index, group in enumerate(self._manifest)}
        prefix = self._location.root.rstrip("/")
        for number, piece in enumerate(self._reader.pieces):
            relative = piece.path.removeprefix(prefix).lstrip("/")
            group = places.get((relative, piece.row_group or 0))
            if group is not None:
                self._piece_of[group], self._group_of[number] = number, group
        return self._reader


def _select(manifest: Manifest, columns: Columns, *, transformed: bool) -> list[str]:
    """Return the columns to read, as the arrow engine would, if Petastorm reads them.

    Raises ValueError for named columns that it does not read, and warns of others that have a tensor.
    """
    if manifest.unischema:
        decoder = Decoder(manifest.unischema, transformed=transformed)
        return decoder.select(columns, [*manifest.schema.names, *manifest.partition_types])
    types = {field.name: field.type for field in manifest.schema}
    chosen = select_columns(manifest, columns, transformed=transformed)
    unread = [name for name in chosen if name in types and not reads(types[name])]
    if unread and columns is not None and unread[0] in columns:
        raise ValueError(
            f"columns: {unread[0]!r} is {types[unread[0]]}, which Petastorm does not read; use engine='arrow'"
        )
    if unread:
        logger.warning(
            "%s: Petastorm does not read the columns %s, so they are left out; engine='arrow' reads them",
            manifest.name,
            ", ".join(f"{name} ({types[name]})" for name in unread),
        )
    return [name for name in chosen if name not in unread]
