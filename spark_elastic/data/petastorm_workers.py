"""Petastorm's readers, workers, pools and caches, adapted to the engine.

Workers read single row groups on request, and mark each row with its piece and its position there. Pools detect processes that
have died, and caches distinguish datasets, choices of columns and transforms. Needs petastorm 0.12.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from spark_elastic._text import shown, without_secrets
from spark_elastic.data.engine import Reading
from spark_elastic.errors import DataError

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

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from petastorm.workers_pool.worker_base import WorkerBase
    from zmq import Poller

    Pool: TypeAlias = DummyPool | ProcessPool | ThreadPool

# A row of a dataset in Petastorm's own format, by column.
Row = dict[str, Any]
T = TypeVar("T")

# Processes of a pool import pyarrow, pandas and the transform's dependencies.
START_SECONDS = 300.0
PIECE, ROW = "__spark_elastic_piece", "__spark_elastic_row"


def _identified(process: Callable[..., None], worker: WorkerBase, piece_index: int, *rest: object) -> None:
    """Let a worker process a piece and publish its rows with their identities. Errors name the piece."""
    publish = worker.publish_func
    published = False

    def publish_identified(rows: pa.Table | Sequence[Row]) -> None:
        nonlocal published
        published = True
        if isinstance(rows, pa.Table):
            numbers = pa.array(np.arange(len(rows), dtype=np.int64))
            rows = rows.append_column(PIECE, pa.array(np.full(len(rows), piece_index, np.int64)))
            publish(rows.append_column(ROW, numbers))
        else:
            publish([{**row, PIECE: piece_index, ROW: number} for number, row in enumerate(rows)])

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
    """A piece of which only the rows in ``keep`` are read, or all if it is None. Remembers where columns are null."""

    def __init__(self, piece: pq.ParquetDatasetPiece, keep: np.ndarray | None) -> None:
        self._piece = piece
        self._keep = keep
        self.nulls: dict[str, np.ndarray] = {}

    def read(self, **arguments: object) -> pa.Table:
        table = self._piece.read(**arguments)
        if self._keep is not None:
            table = table.take(pa.array(self._keep))
        for name in table.column_names:
            if table.column(name).null_count:
                self.nulls[name] = np.flatnonzero(table.column(name).is_null().to_numpy())
        return table


class IdentifiedArrowWorker(ArrowReaderWorker):
    """Petastorm's worker for plain Parquet, publishing tables with two more columns. ``keep``: the rows to read."""

    def process(self, piece_index: int, keep: np.ndarray | None, shuffle_row_drop_partition: object) -> None:
        """Read the rows of one row group that ``keep`` names."""
        self._keep = keep
        _identified(super().process, self, piece_index, None, shuffle_row_drop_partition)

    def _load_rows(
        self, pq_file: pq.ParquetFile, piece: pq.ParquetDatasetPiece, shuffle_row_drop_range: object
    ) -> pa.Table:
        return super()._load_rows(pq_file, _Chosen(piece, self._keep), shuffle_row_drop_range)


class IdentifiedDictWorker(PyDictReaderWorker):
    """Petastorm's worker for its own datasets, publishing dicts with two more keys. ``keep``: the rows to read."""

    def process(self, piece_index: int, keep: np.ndarray | None, shuffle_row_drop_partition: object) -> None:
        """Read the rows of one row group that ``keep`` names."""
        self._keep = keep
        _identified(super().process, self, piece_index, None, shuffle_row_drop_partition)

    def _load_rows(
        self, pq_file: pq.ParquetFile, piece: pq.ParquetDatasetPiece, shuffle_row_drop_range: object
    ) -> list[Row]:
        chosen = _Chosen(piece, self._keep)
        rows: list[Row] = super()._load_rows(pq_file, chosen, shuffle_row_drop_range)
        for name, places in chosen.nulls.items():
            for place in places:
                # Pandas has turned a null into NaN, and no TransformSpec has changed that.
                if place < len(rows) and _is_nan(rows[place].get(name)):
                    rows[place][name] = None
        return rows


def _is_nan(value: object) -> bool:
    return isinstance(value, (float, np.floating)) and bool(np.isnan(value))


class _KeyedCache(CacheBase):
    """A cache whose entries belong to one dataset, as listed, and to one choice of columns, rows and transform."""

    def __init__(self, cache: CacheBase, prefix: str) -> None:
        self._cache = cache
        self._prefix = prefix

    def get(self, key: str, fill_cache_func: Callable[[], T]) -> T:
        cached: T = self._cache.get(f"{self._prefix}:{key}", fill_cache_func)
        return cached

    def cleanup(self) -> None:
        self._cache.cleanup()


class _WatchedPool(ProcessPool):
    """A Petastorm process pool that waits for slow-starting workers, but not for dead ones."""

    _results_receiver_poller: Poller | _WatchedPoller

    def _wait_for_workers_to_start(self) -> None:
        poller = self._results_receiver_poller = _WatchedPoller(self._results_receiver_poller, self._workers)
        deadline = time.monotonic() + START_SECONDS
        for _ in range(self.workers_count):
            while not poller.poll(1000):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"its processes did not answer within {START_SECONDS:g} s")
            self._results_receiver.recv_pyobj()


class _WatchedPoller:
    """The poller of a process pool. Unlike Petastorm's, it does not wait forever if a worker process has died."""

    def __init__(self, poller: Poller | _WatchedPoller, workers: list[subprocess.Popen[bytes]]) -> None:
        self._poller = poller
        self._workers = workers

    def poll(self, milliseconds: float) -> Sequence[object]:
        found: Sequence[object] = self._poller.poll(milliseconds)
        codes = [worker.poll() for worker in self._workers]
        if not found and any(code is not None for code in codes):
            raise RuntimeError(f"a reader process ended by itself, exit codes {codes}")
        return found


class _OnDemand(Ventilator):
    """A ventilator that passes nothing to the workers by itself: the engine requests pieces as needed."""

    def start(self) -> None:
        pass

    def processed_item(self) -> None:
        pass

    def completed(self) -> bool:
        return False

    def stop(self) -> None:
        pass


class PieceReader(Reader):
    """Petastorm's Reader. Only its schema, pieces and pool are used."""

    pieces: list[pq.ParquetDatasetPiece]

    def _filter_row_groups(
        self, dataset: pq.ParquetDataset, row_groups: list[pq.ParquetDatasetPiece], *rest: object
    ) -> tuple[list[int], None]:
        self.pieces = row_groups
        return list(range(len(row_groups))), None

    def _create_ventilator(self, *arguments: object) -> Ventilator:
        return _OnDemand(self._workers_pool.ventilate)

    def ask(self, piece: int, keep: np.ndarray | None) -> None:
        """Ask the workers to read a piece, or these rows of it."""
        self._workers_pool.ventilate(piece_index=piece, keep=keep, shuffle_row_drop_partition=(0, 1))

    def abandon(self) -> None:
        """Stop without waiting for anything."""
        _abandon(self._workers_pool)

    def answer(self) -> pa.Table | list[Row]:
        """Return the next piece that the workers have finished, whichever it is."""
        return self._workers_pool.get_results()


def open_reader(reading: Reading, columns: Sequence[str], cache_key: Callable[[], str]) -> PieceReader:
    """Start the workers. Raises ``DataError`` if they do not start. Suppresses Petastorm's own warnings.

    The result of ``cache_key`` prefixes the names of all cache entries.
    """
    location, options, own_format = reading.locations[0], reading.options or {}, bool(reading.manifest.unischema)
    url = f"file://{location.root}" if location.local else reading.manifest.urls[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filesystem, path = get_filesystem_and_path_or_paths(
            url, hdfs_driver=options.get("hdfs_driver", "libhdfs3"), storage_options=reading.storage_options
        )
        pool = _pool(options, own_format)
        try:
            return PieceReader(
                filesystem,
                path,
                schema_fields=[re.escape(name) for name in columns] or None,
                reader_pool=pool,
                worker_class=IdentifiedDictWorker if own_format else IdentifiedArrowWorker,
                cache=_cache(options, cache_key),
                transform_spec=reading.transform,
                is_batched_reader=not own_format,
                shuffle_row_groups=False,
            )
        except Exception as failure:
            _abandon(pool)
            raise DataError(
                f"{shown(url)}: Petastorm's workers did not start: {without_secrets(failure, url)}"
            ) from failure


def reads(kind: pa.DataType) -> bool:
    """Whether Petastorm knows an Arrow type. It leaves out columns of other types."""
    try:
        _numpy_and_codec_from_arrow_type(kind)
    except ValueError:
        return False
    return True


def _abandon(pool: Pool) -> None:
    """End a pool that did not start or has failed: its processes, and its sockets, for which zmq would wait at exit."""
    for worker in getattr(pool, "_workers", []):
        if isinstance(worker, subprocess.Popen):
            worker.kill()
            worker.wait()
    context = getattr(pool, "_context", None)
    if context is not None:
        context.destroy(linger=0)


def _pool(options: Mapping[str, object], own_format: bool) -> Pool:
    kind, workers = options.get("reader_pool_type", "thread"), options.get("workers_count", 2)
    if kind == "thread":
        return ThreadPool(workers, options.get("results_queue_size", 50))
    if kind == "process":
        serializer = PickleSerializer() if own_format else ArrowTableSerializer()
        return _WatchedPool(workers, serializer, zmq_copy_buffers=options.get("zmq_copy_buffers", True))
    if kind == "dummy":
        return DummyPool()
    raise ValueError(f"reader_pool_type must be one of thread, process, dummy, not {kind!r}")


def _cache(options: Mapping[str, Any], key: Callable[[], str]) -> CacheBase:
    kind = options.get("cache_type", "null")
    if kind in (None, "null"):
        return NullCache()
    if kind == "local-disk":
        cache = LocalDiskCache(
            options.get("cache_location"),
            options.get("cache_size_limit"),
            options.get("cache_row_size_estimate"),
            **(options.get("cache_extra_settings") or {}),
        )
        return _KeyedCache(cache, key())
    raise ValueError(f"cache_type must be one of null, local-disk, not {kind!r}")
