"""Reads row groups through Petastorm's own reader workers: its codecs, TransformSpec, pools and caches.

Petastorm chooses an order of its own and says nothing of where a row came from. Here its workers are asked for single
row groups, in the order that ours needs, and give each row the identity of its piece and its place in it; what arrives
is compared with what was asked for. Rows that do not pass the filters are left out before anything is decoded, and fields
that are null in the files are None where Petastorm makes NaN of them. Needs petastorm 0.12 and what it needs (the extra
`petastorm`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from spark_elastic.data.arrow_engine import select_columns
from spark_elastic.data.columns import Column, Ragged, Rows
from spark_elastic.data.convert import convertible, to_column
from spark_elastic.data.engine import Reading
from spark_elastic.data.filesystem import Location, shown
from spark_elastic.data.filters import RowFilter
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.source import Source
from spark_elastic.data.unischema import Decoder
from spark_elastic.errors import DataError

logger = logging.getLogger("spark_elastic")

INSTALL = "pip install 'spark-elastic[petastorm]' in an environment of its own (it needs pyarrow<15 and numpy<2)"


def _import() -> None:
    try:
        version = importlib.metadata.version("petastorm")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"engine='petastorm' needs petastorm 0.12.1: {INSTALL}") from None
    if not version.startswith("0.12."):
        raise ImportError(
            f"engine='petastorm' refuses petastorm {version}: the thread pool of 0.13 silently loses rows; {INSTALL}"
        )
    try:
        import petastorm.reader  # noqa: F401
    except Exception as failure:
        raise ImportError(f"petastorm {version} cannot be imported here ({failure}): {INSTALL}") from failure


_import()

from petastorm.arrow_reader_worker import ArrowReaderWorker  # noqa: E402
from petastorm.cache import CacheBase, NullCache  # noqa: E402
from petastorm.fs_utils import get_filesystem_and_path_or_paths  # noqa: E402
from petastorm.local_disk_cache import LocalDiskCache  # noqa: E402
from petastorm.py_dict_reader_worker import PyDictReaderWorker  # noqa: E402
from petastorm.reader import Reader  # noqa: E402
from petastorm.reader_impl.arrow_table_serializer import ArrowTableSerializer  # noqa: E402
from petastorm.reader_impl.pickle_serializer import PickleSerializer  # noqa: E402
from petastorm.unischema import _numpy_and_codec_from_arrow_type  # noqa: E402
from petastorm.workers_pool.dummy_pool import DummyPool  # noqa: E402
from petastorm.workers_pool.process_pool import ProcessPool  # noqa: E402
from petastorm.workers_pool.thread_pool import ThreadPool  # noqa: E402
from petastorm.workers_pool.ventilator import Ventilator  # noqa: E402

# Processes of a pool import pyarrow, pandas and what the transform needs.
START_SECONDS = 300.0
_PIECE, _ROW = "__spark_elastic_piece", "__spark_elastic_row"
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


def _identified(process: Callable[..., None], worker: Any, piece_index: int, *rest: Any) -> None:
    """Let a worker process a piece and publish its rows with their identities; name the piece where it fails."""
    publish = worker.publish_func
    published = False

    def publish_identified(rows: Any) -> None:
        nonlocal published
        published = True
        if isinstance(rows, pa.Table):
            numbers = pa.array(np.arange(len(rows), dtype=np.int64))
            rows = rows.append_column(_PIECE, pa.array(np.full(len(rows), piece_index, np.int64)))
            publish(rows.append_column(_ROW, numbers))
        else:
            publish([{**row, _PIECE: piece_index, _ROW: number} for number, row in enumerate(rows)])

    worker.publish_func = publish_identified
    try:
        process(piece_index, *rest)
    except Exception as failure:
        piece = worker._split_pieces[piece_index]
        message = f"{piece.path}, row group {piece.row_group}: {type(failure).__name__}: {failure}"
        raise RuntimeError(message) from None
    finally:
        worker.publish_func = publish
    if not published:
        piece = worker._split_pieces[piece_index]
        raise RuntimeError(f"{piece.path}, row group {piece.row_group}: no rows came out of it")


class _Chosen:
    """A piece of which only the rows in ``keep`` are read, all where that is None; remembers where columns are null."""

    def __init__(self, piece: Any, keep: np.ndarray | None) -> None:
        self._piece = piece
        self._keep = keep
        self.nulls: dict[str, np.ndarray] = {}

    def read(self, **arguments: Any) -> pa.Table:
        table = self._piece.read(**arguments)
        if self._keep is not None:
            table = table.take(pa.array(self._keep))
        for name in table.column_names:
            if table.column(name).null_count:
                self.nulls[name] = np.flatnonzero(table.column(name).is_null().to_numpy())
        return table


class IdentifiedArrowWorker(ArrowReaderWorker):
    """Petastorm's worker for plain Parquet, publishing tables with two more columns. ``keep``: the rows to read."""

    def process(self, piece_index: int, keep: np.ndarray | None, shuffle_row_drop_partition: Any) -> None:
        """Read one row group, of which ``keep`` names the rows that are wanted."""
        self._keep = keep
        _identified(super().process, self, piece_index, None, shuffle_row_drop_partition)

    def _load_rows(self, pq_file: Any, piece: Any, shuffle_row_drop_range: Any) -> Any:
        return super()._load_rows(pq_file, _Chosen(piece, self._keep), shuffle_row_drop_range)


class IdentifiedDictWorker(PyDictReaderWorker):
    """Petastorm's worker for its own datasets, publishing dicts with two more keys. ``keep``: the rows to read."""

    def process(self, piece_index: int, keep: np.ndarray | None, shuffle_row_drop_partition: Any) -> None:
        """Read one row group, of which ``keep`` names the rows that are wanted."""
        self._keep = keep
        _identified(super().process, self, piece_index, None, shuffle_row_drop_partition)

    def _load_rows(self, pq_file: Any, piece: Any, shuffle_row_drop_range: Any) -> list[dict[str, Any]]:
        chosen = _Chosen(piece, self._keep)
        rows: list[dict[str, Any]] = super()._load_rows(pq_file, chosen, shuffle_row_drop_range)
        for name, places in chosen.nulls.items():
            for place in places:
                # Pandas has made NaN of it, and no TransformSpec anything else.
                if place < len(rows) and _is_nan(rows[place].get(name)):
                    rows[place][name] = None
        return rows


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and bool(np.isnan(value))


class _KeyedCache(CacheBase):
    """A cache whose entries are of one dataset, as listed, and of one choice of columns, rows and transform.

    Petastorm's own keys name the place of a row group only.
    """

    def __init__(self, cache: Any, prefix: str) -> None:
        self._cache = cache
        self._prefix = prefix

    def get(self, key: str, fill_cache_func: Callable[[], Any]) -> Any:
        return self._cache.get(f"{self._prefix}:{key}", fill_cache_func)

    def cleanup(self) -> None:
        self._cache.cleanup()


class _WatchedPool(ProcessPool):
    """Petastorm's process pool, which waits for workers that boot slowly and not for ones that have died."""

    _results_receiver_poller: Any

    def _wait_for_workers_to_start(self) -> None:
        poller = self._results_receiver_poller = _WatchedPoller(self._results_receiver_poller, self._workers)
        deadline = time.monotonic() + START_SECONDS
        for _ in range(self.workers_count):
            while not poller.poll(1000):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"its processes did not answer within {START_SECONDS:g} s")
            self._results_receiver.recv_pyobj()


class _WatchedPoller:
    """The poller of a process pool, of which Petastorm's waits for ever where a worker process has died."""

    def __init__(self, poller: Any, workers: list[Any]) -> None:
        self._poller = poller
        self._workers = workers

    def poll(self, milliseconds: float) -> Any:
        found = self._poller.poll(milliseconds)
        codes = [worker.poll() for worker in self._workers]
        if not found and any(code is not None for code in codes):
            raise RuntimeError(f"a reader process ended by itself, exit codes {codes}")
        return found


class _OnDemand(Ventilator):
    """Hands nothing to the workers by itself: the engine asks for pieces when it needs them."""

    def start(self) -> None:
        pass

    def processed_item(self) -> None:
        pass

    def completed(self) -> bool:
        return False

    def stop(self) -> None:
        pass


class _PieceReader(Reader):
    """Petastorm's Reader, of which the schema, the pieces and the pool are used."""

    pieces: list[Any]

    def _filter_row_groups(self, dataset: Any, row_groups: list[Any], *rest: Any) -> tuple[list[int], None]:
        self.pieces = row_groups
        return list(range(len(row_groups))), None

    def _create_ventilator(self, *arguments: Any) -> Ventilator:
        return _OnDemand(self._workers_pool.ventilate)

    def ask(self, piece: int, keep: np.ndarray | None) -> None:
        """Have the workers read a piece, or these rows of it."""
        self._workers_pool.ventilate(piece_index=piece, keep=keep, shuffle_row_drop_partition=(0, 1))

    def abandon(self) -> None:
        """Stop without waiting for anything."""
        _abandon(self._workers_pool)

    def answer(self) -> Any:
        """Return the next piece that the workers have read, whichever it is."""
        return self._workers_pool.get_results()


def open_engine(reading: Reading) -> PetastormEngine:
    """Make the engine for a dataset. Raises where the arguments do not fit."""
    return PetastormEngine(
        reading.manifest,
        reading.location,
        reading.columns,
        row_filter=reading.row_filter,
        transform=reading.transform,
        options=reading.options,
        storage_options=reading.storage_options,
    )


class PetastormEngine:
    """Reads row groups with Petastorm's workers.

    columns: field names, or None for all. transform: a petastorm TransformSpec; it may not change the number of rows.
    options: of `petastorm.make_reader`: reader_pool_type, workers_count, cache_type and the like. Row groups are
    held whole, as Petastorm delivers them. Workers start with the first read and stop with `close`.
    """

    # Petastorm's schemas do not tell.
    row_bytes = 0.0

    def __init__(
        self,
        manifest: Manifest,
        location: Location,
        columns: Sequence[str] | None,
        *,
        row_filter: RowFilter | None = None,
        transform: Any = None,
        options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        unknown = sorted(set(options or {}) - set(_OPTIONS))
        if unknown:
            raise ValueError(f"engine_options must be among {', '.join(_OPTIONS)}, not {', '.join(unknown)}")
        if transform is not None and not hasattr(transform, "edit_fields"):
            raise ValueError("engine='petastorm' takes a petastorm.transform.TransformSpec as its transform=")
        self._manifest = manifest
        self._columns = _select(manifest, columns, transformed=transform is not None)
        if not self._columns and columns is None:
            raise ValueError(
                f"no column of {shown(manifest.url)} is of numbers that Petastorm reads ({manifest.schema.names}); give a "
                "transform=, or use engine='arrow'"
            )
        self._filter = row_filter
        self._transform = transform
        self._options = dict(options or {})
        self._storage_options = storage_options
        self._source = Source(manifest, location)
        self._location = location
        self._process = os.getpid()
        self._reader: _PieceReader | None = None
        self._piece_of: dict[int, int] = {}
        self._group_of: dict[int, int] = {}
        self._asked: set[int] = set()
        self._arrived: dict[int, Any] = {}
        # The rows of row groups that were asked for, where a filter chooses.
        self._kept: dict[int, np.ndarray] = {}

    def expect(self, group: int) -> None:
        """Have a row group read that will be needed soon."""
        reader = self._start()
        if group not in self._asked and group in self._piece_of:
            self._source.check(group)
            if self._filter is not None:
                self._kept[group] = self._passing(group)
            self._asked.add(group)
            reader.ask(self._piece_of[group], self._kept.get(group))

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        """Yield rows [start, stop) of a row group; see `Engine.read`."""
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
                raise DataError(f"Petastorm's workers failed: {failure}") from failure
            piece = int(result.column(_PIECE)[0].as_py()) if isinstance(result, pa.Table) else result[0][_PIECE]
            self._arrived[self._group_of[piece]] = result
        self._asked.discard(group)
        return self._convert(group, self._arrived.pop(group))

    def _convert(self, group: int, result: Any) -> Rows:
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
        if self._transform is None:
            missing = [name for name in self._columns if name not in columns]
            if missing:
                raise DataError(f"{where}: Petastorm delivered no column {missing[0]!r}; use engine='arrow'")
            columns = {name: columns[name] for name in self._columns}
        return Rows(group, np.arange(len(index), dtype=np.int64), index, columns)

    def _passing(self, group: int) -> np.ndarray:
        assert self._filter is not None
        found, first = [], 0
        for batch in self._source.batches(group, self._filter.columns, 65_536):
            numbers = pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
            first += batch.num_rows
            table = pa.Table.from_batches([batch]).append_column(_ROW, numbers)
            found.append(self._filter.apply(table).column(_ROW).to_numpy())
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _from_table(self, table: pa.Table, where: str) -> tuple[np.ndarray, dict[str, Column]]:
        assert self._reader is not None
        columns: dict[str, Column] = {}
        for name in table.column_names:
            if name not in (_PIECE, _ROW) and convertible(table.schema.field(name).type):
                column = to_column(table.column(name), name, where)
                shape = tuple(self._reader.schema.fields[name].shape or ())
                if len(shape) > 1 and isinstance(column, np.ndarray):
                    column = column.reshape(len(table), *shape)
                columns[name] = column
        return table.column(_ROW).to_numpy(), columns

    def _from_dicts(self, rows: list[dict[str, Any]], where: str) -> tuple[np.ndarray, dict[str, Column]]:
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
        return np.array([row[_ROW] for row in rows], np.int64), columns

    def _cache(self) -> Any:
        cache = _cache(self._options)
        if isinstance(cache, NullCache):
            return cache
        rows = self._filter.text if self._filter is not None else ""
        made_of = cloudpickle.dumps((self._manifest.fingerprint, self._columns, rows, self._transform))
        return _KeyedCache(cache, hashlib.blake2b(made_of, digest_size=16).hexdigest())

    def _start(self) -> _PieceReader:
        if self._reader is not None and self._process == os.getpid():
            return self._reader
        self._process = os.getpid()
        self._asked.clear()
        self._arrived.clear()
        options, own_format = self._options, bool(self._manifest.unischema)
        url = f"file://{self._location.root}" if self._location.local else self._manifest.url
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            filesystem, path = get_filesystem_and_path_or_paths(
                url, hdfs_driver=options.get("hdfs_driver", "libhdfs3"), storage_options=self._storage_options
            )
            pool = _pool(options, own_format)
            try:
                self._reader = _PieceReader(
                    filesystem,
                    path,
                    schema_fields=[re.escape(name) for name in self._columns] or None,
                    reader_pool=pool,
                    worker_class=IdentifiedDictWorker if own_format else IdentifiedArrowWorker,
                    cache=self._cache(),
                    transform_spec=self._transform,
                    is_batched_reader=not own_format,
                    shuffle_row_groups=False,
                )
            except Exception as failure:
                _abandon(pool)
                raise DataError(f"{url}: Petastorm's workers did not start: {failure}") from failure
        places = {(group.path, group.ordinal): index for index, group in enumerate(self._manifest)}
        prefix = self._location.root.rstrip("/")
        for number, piece in enumerate(self._reader.pieces):
            relative = piece.path.removeprefix(prefix).lstrip("/")
            group = places.get((relative, piece.row_group or 0))
            if group is not None:
                self._piece_of[group], self._group_of[number] = number, group
        return self._reader


def _select(manifest: Manifest, columns: Sequence[str] | None, *, transformed: bool) -> list[str]:
    """Return the columns to read, as the arrow engine would, if Petastorm reads them.

    Raises ValueError for named columns that it does not read, and warns of others that have a tensor.
    """
    if manifest.unischema:
        decoder = Decoder(manifest.unischema, transformed=transformed)
        return decoder.select(columns, [*manifest.schema.names, *manifest.partition_types])
    types = {field.name: field.type for field in manifest.schema}
    chosen = select_columns(manifest, columns, transformed=transformed)
    unread = [name for name in chosen if name in types and not _reads(types[name])]
    if unread and columns is not None:
        raise ValueError(
            f"columns: {unread[0]!r} is {types[unread[0]]}, which Petastorm does not read; use engine='arrow'"
        )
    if unread:
        logger.warning(
            "%s: Petastorm does not read the columns %s, so they are left out; engine='arrow' reads them",
            shown(manifest.url),
            ", ".join(f"{name} ({types[name]})" for name in unread),
        )
    return [name for name in chosen if name not in unread]


def _reads(kind: pa.DataType) -> bool:
    """Whether Petastorm knows an Arrow type; columns of others it leaves out."""
    try:
        _numpy_and_codec_from_arrow_type(kind)
    except ValueError:
        return False
    return True


def _abandon(pool: Any) -> None:
    """End a pool that did not start or has failed: its processes, and its sockets, for which zmq would wait at the exit."""
    for worker in getattr(pool, "_workers", []):
        if isinstance(worker, subprocess.Popen):
            worker.kill()
            worker.wait()
    context = getattr(pool, "_context", None)
    if context is not None:
        context.destroy(linger=0)


def _pool(options: Mapping[str, Any], own_format: bool) -> Any:
    kind, workers = options.get("reader_pool_type", "thread"), options.get("workers_count", 2)
    if kind == "thread":
        return ThreadPool(workers, options.get("results_queue_size", 50))
    if kind == "process":
        serializer = PickleSerializer() if own_format else ArrowTableSerializer()
        return _WatchedPool(workers, serializer, zmq_copy_buffers=options.get("zmq_copy_buffers", True))
    if kind == "dummy":
        return DummyPool()
    raise ValueError(f"reader_pool_type must be one of thread, process, dummy, not {kind!r}")


def _cache(options: Mapping[str, Any]) -> Any:
    kind = options.get("cache_type", "null")
    if kind in (None, "null"):
        return NullCache()
    if kind == "local-disk":
        return LocalDiskCache(
            options.get("cache_location"),
            options.get("cache_size_limit"),
            options.get("cache_row_size_estimate"),
            **(options.get("cache_extra_settings") or {}),
        )
    raise ValueError(f"cache_type must be one of null, local-disk, not {kind!r}")
