"""``ParquetLoader``: batches of tensors from the row groups of a Parquet dataset, each row once per epoch in any world."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from spark_elastic._integers import whole_number
from spark_elastic._saved_names import saved_as
from spark_elastic.data.column_choice import Columns
from spark_elastic.data.engine import ENGINES, Reading, open_engine
from spark_elastic.data.engine_loader import EngineLoader
from spark_elastic.data.filesystem import Location, Urls, as_urls, locate
from spark_elastic.data.filters import Filters, RowFilter
from spark_elastic.data.manifest import Manifest, read_manifest
from spark_elastic.data.ngram import NGram
from spark_elastic.data.ngram_engine import NGramEngine, WindowFinder
from spark_elastic.data.order import OrderSpec, choose_spec, describe
from spark_elastic.data.pinning import key_of, pin
from spark_elastic.data.plan import BatchPlan, check_switches
from spark_elastic.data.predicates import PredicateBase
from spark_elastic.data.randomness import digest_of_random_states, own_generators
from spark_elastic.data.reader_arguments import dataset_of, loader_arguments
from spark_elastic.data.rowgroup_index import Selection
from spark_elastic.data.selectors import RowGroupSelectorBase
from spark_elastic.data.tracker import RowGroupTracker
from spark_elastic.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from petastorm.transform import TransformSpec


@saved_as("spark_elastic.data")
class ParquetLoader(EngineLoader):
    """Iterates over the rest of the current epoch, yielding ``dict[str, torch.Tensor]`` with rows as the first dimension.

    Args:
        url: a directory or file: local, ``file://``, or any URL that fsspec opens with ``storage_options``. A list is one
            dataset.
        batch_size, global_batch_size: the rows in a batch, on each rank or on all ranks together. Give exactly one of them.
            With ``global_batch_size``, a step holds the same rows in every world.
        shards: cut every global batch into this many shards, at least ``max_np``. One rank computes each whole shard, in a loop
            over ``model.parts(batch)``. The trained weights then have the same bits in every world.
        columns: names to read, and compiled patterns (``re.compile``) of whole names; by default all that can become tensors.
            They include the partition columns of Hive paths.
        shards_strict: refuse to continue from a state that was made with different kernels (torch and its libraries, their
            instruction set, threads, device, deterministic switches), which produce different bits; False warns once.
        balance: "auto" adapts each rank's share of the global batch, in rows or shards, to its speed, on CPUs in a State with
            wrapped models; None keeps shares even.
        shuffle, shuffle_rows: permute row groups, and shuffle rows within windows of ``shuffle_rows`` rows in total (0 or 1: row
            groups only). Without shuffling, rows come in the order of the files, and every rank reads all of them.
        seed: for everything random. The order depends on the seed and the epoch only.
        filters: in pyarrow's form. Rows that pass are counted when the loader is made; if there are none, a warning is issued.
        predicate: from ``spark_elastic.data.predicates`` or from Petastorm; evaluated for each row that passes ``filters``.
        rowgroup_selector: from ``spark_elastic.data.selectors`` or from Petastorm. Only the row groups that it selects by
            Petastorm's index count as part of the dataset, before anything else is chosen.
        engine, engine_options: "arrow", or "petastorm" for Petastorm's reader workers, with options of ``petastorm.make_reader``.
        transform: called with a pyarrow.Table of some rows of one row group; returns a table or a dict of arrays or tensors
            with as many rows. May run on another thread. The number of rows varies from call to call.
        ngram: windows of consecutive rows, each of which counts as a row; see ``NGram``. The columns of its fields are read,
            unless a ``transform`` makes them from ``columns``.
        drop_last: drop the rows that do not fill a last global batch.
        with_row_ids: add int64 ``_row_group`` (index in the manifest) and ``_row`` (position in the stored row group; for a
            window, that of its first row).
        prefetch: batches read ahead; by default 32,768 rows' worth, or fewer if those take more than 64 MiB.
        pin_memory: by default, if CUDA is available.
        storage_options: options for fsspec, such as credentials and endpoints.
        shard: a (rank, size) for use outside a State: yield that rank's part of each batch, without repeated batches.

    Lists become dense [rows, n] tensors if all have one length, else jagged nested tensors. No thread is started before the
    loader is iterated. Raises ValueError for arguments that do not fit, and DataError if the dataset cannot be read.
    """

    def __init__(
        self,
        url: Urls,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shards: int | None = None,
        shards_strict: bool = True,
        balance: str | None = None,
        columns: Columns = None,
        shuffle: bool = True,
        shuffle_rows: int | None = None,
        seed: int = 0,
        engine: str = "arrow",
        engine_options: Mapping[str, object] | None = None,
        transform: Callable[[pa.Table], object] | TransformSpec | None = None,
        filters: Filters = None,
        predicate: PredicateBase | None = None,
        rowgroup_selector: RowGroupSelectorBase | None = None,
        ngram: NGram | None = None,
        drop_last: bool = False,
        with_row_ids: bool = False,
        prefetch: int | None = None,
        storage_options: Mapping[str, object] | None = None,
        pin_memory: bool | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        """Read the footers of all files, and count rows by reading the columns of ``filters``, ``predicate`` and ``ngram``.

        This blocks until both are done. In a job, the first worker reads, and all others get its results. Raises ValueError or
        TypeError for arguments that do not fit, and DataError if the dataset cannot be read. Warns if no rows are left.
        """
        check_switches(shuffle=shuffle, drop_last=drop_last, with_row_ids=with_row_ids)
        plan = BatchPlan(batch_size, global_batch_size, drop_last, shards, balance)
        seed = whole_number("seed", seed, 0)
        if prefetch is not None:
            prefetch = whole_number("prefetch", prefetch, 1)
        if engine not in tuple(ENGINES):  # a user's value need not be hashable
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
        urls = as_urls(url)
        self.manifest = _read_manifest_once(urls, storage_options)
        locations = [locate(each, storage_options) for each in urls]
        total = int(self.manifest.rows.sum())
        if rowgroup_selector is not None:
            selection = Selection(self.manifest, locations, rowgroup_selector)
            self.manifest = selection.of(_once("selection", self.manifest, selection.key, selection.find))
        row_filter, rows = _filtered(self.manifest, locations, filters, predicate)
        if shards is not None and callable(transform) and engine == "arrow":
            transform = _WithoutRandomness(transform)
        reading = Reading(
            manifest=self.manifest,
            locations=locations,
            columns=_columns_to_read(columns, ngram, transform),
            row_filter=row_filter,
            transform=transform,
            options=engine_options,
            storage_options=storage_options,
        )
        source = open_engine(engine, reading)
        if ngram is not None:
            finder = WindowFinder(ngram, reading)
            rows = np.frombuffer(_once("windows", self.manifest, finder.key, finder.count), "<i8")
            source = NGramEngine(finder, source)
        if total and not rows.any():
            given = {"rowgroup_selector": rowgroup_selector, "filters": filters, "predicate": predicate, "ngram": ngram}
            causes = " and ".join(f"{name}=" for name, choice in given.items() if choice is not None)
            text = f"{self.manifest.name}: {causes} left none of its {total} rows: the loader has no batches"
            warnings.warn(text, stacklevel=2)
        if reading.columns is not None and not reading.columns and not with_row_ids:
            raise ValueError("columns=[] names no column; with with_row_ids=True it would be enough")
        decoded = source.row_bytes
        row_bytes = _estimate_row_bytes(self.manifest, ngram, decoded)
        spec = choose_spec(
            groups=int(np.count_nonzero(rows)),
            batch=plan.smallest,
            seed=seed,
            shuffle=shuffle,
            shuffle_rows=shuffle_rows,
            row_bytes=row_bytes,
        )
        super().__init__(
            RowGroupTracker(rows, spec, plan),
            _identity(self.manifest, ngram, row_filter, rows, spec),
            source,
            self.manifest.where,
            row_bytes=decoded if decoded and transform is None else row_bytes,
            jagged=frozenset(name for name, length in self.manifest.list_lengths if length is None and ngram is None),
            dense_stays=transform is not None,
            row_ids=with_row_ids,
            prefetch=prefetch,
            pin_memory=pin_memory,
            shard=shard,
            shards_strict=shards_strict,
        )

    @classmethod
    def from_reader_arguments(cls, dataset_url: Urls | None = None, **arguments: object) -> ParquetLoader:
        """Make a loader from the arguments of Petastorm's ``make_reader`` or ``make_batch_reader``.

        dataset_url: the reader's URL or list of URLs; ``dataset_url_or_urls=`` is an alias. arguments: keyword arguments of both
        functions, of ``petastorm.pytorch.DataLoader`` (``batch_size``, ``shuffling_queue_capacity``), and of this loader, such as
        ``global_batch_size``. If a reader and the loader share an argument's name, the reader's meaning applies: ``shuffle_rows``
        is True or False.

        Raises ValueError for arguments without a counterpart, saying what to do instead.
        """
        return cls(dataset_of(dataset_url, arguments), **loader_arguments(arguments))


def _read_manifest_once(urls: tuple[str, ...], storage_options: Mapping[str, object] | None) -> Manifest:
    """Read the dataset's manifest once for the whole job."""
    key = f"data/manifest/{json.dumps(urls)}/{key_of(storage_options)}"
    return Manifest.decode(pin(key, lambda: read_manifest(urls, storage_options=storage_options).encode()))


def _filtered(
    manifest: Manifest, locations: Sequence[Location], filters: Filters, predicate: PredicateBase | None
) -> tuple[RowFilter | None, np.ndarray]:
    """Return the filter of rows, if there is one, and how many rows of each row group pass it: int64 [row groups]."""
    if filters is None and predicate is None:
        return None, manifest.rows
    row_filter = RowFilter(manifest, filters, predicate)
    count = functools.partial(row_filter.count, manifest, locations)
    return row_filter, row_filter.expect(_once("filter", manifest, row_filter.key, count))


def _columns_to_read(columns: Columns, ngram: NGram | None, transform: object) -> Columns:
    """Return the columns that the user gives, or those of the windows. Raises ValueError if both are given."""
    if ngram is not None and not isinstance(ngram, NGram):
        raise ValueError(f"ngram must be an NGram, not {ngram!r}")
    if ngram is None or transform is not None:
        return columns
    if columns is not None:
        raise ValueError("give columns= or ngram=, whose fields say which columns are read, not both")
    return ngram.columns


def _identity(
    manifest: Manifest, ngram: NGram | None, row_filter: RowFilter | None, rows: np.ndarray, spec: OrderSpec
) -> dict[str, object]:
    """Return what a saved position is recognized by."""
    return {
        "kind": "parquet",
        "dataset": manifest.fingerprint,
        **({"content": manifest.content} if manifest.content else {}),
        **({} if ngram is None else {"ngram": ngram.describe()}),
        "filters": row_filter.text if row_filter else "",
        "rows": int(rows.sum()),
        "seed": spec.seed,
        "shuffle": spec.shuffle,
        "order": describe(spec),
    }


def _estimate_row_bytes(manifest: Manifest, ngram: NGram | None, decoded: float) -> float:
    """Estimate the memory of a row: what it decodes to, if that is known (else 0), or its size in the files if that is more.

    Files hold values that repeat, such as the zeros of a one-hot vector, in a small part of that.
    """
    stored = float(sum(group.uncompressed_bytes for group in manifest)) / max(1, int(manifest.rows.sum()))
    return max(1.0, stored if ngram is None else stored * len(ngram.fields), decoded)


class _WithoutRandomness:
    """A transform whose first call is watched. It is made while the first batch is waited for, so nobody else draws."""

    def __init__(self, transform: Callable[[pa.Table], object]) -> None:
        self._transform = transform
        self._is_known = False

    def __call__(self, table: pa.Table) -> object:
        if self._is_known:
            return self._transform(table)
        self._is_known = True
        own = own_generators(self._transform)
        before = digest_of_random_states(own)
        result = self._transform(table)
        if digest_of_random_states(own) != before:
            raise DataError(
                "transform= draws random numbers, and with shards= the rows that it gets at a time, and so what each row gets, "
                "depend on the world: draw in the loop over model.parts(batch), for which generators are seeded part by part"
            )
        return result


def _once(what: str, manifest: Manifest, key: str | None, count: Callable[[], bytes]) -> bytes:
    """Count once for the whole job, if ``key`` identifies what is counted in all processes; else in each process."""
    return count() if key is None else pin(f"data/{what}/{manifest.fingerprint}{manifest.content}/{key}", count)
