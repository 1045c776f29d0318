"""`ParquetLoader`: batches of tensors from the row groups of a Parquet dataset, each row once an epoch in any world."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spark_elastic._integers import whole_number
from spark_elastic._saved_names import saved_as
from spark_elastic.data.choice import Columns
from spark_elastic.data.engine import ENGINES, Reading, open_engine
from spark_elastic.data.engine_loader import EngineLoader
from spark_elastic.data.filesystem import Urls, as_urls, locate
from spark_elastic.data.filters import Filters, RowFilter
from spark_elastic.data.manifest import Manifest, read_manifest
from spark_elastic.data.ngram import NGram
from spark_elastic.data.ngram_engine import NGramEngine, WindowFinder
from spark_elastic.data.order import choose_spec, describe
from spark_elastic.data.pinning import key_of, pin
from spark_elastic.data.plan import BatchPlan, check_switches
from spark_elastic.data.predicates import PredicateBase
from spark_elastic.data.reader_arguments import dataset_of, loader_arguments
from spark_elastic.data.rowgroup_index import Selection
from spark_elastic.data.selectors import RowGroupSelectorBase
from spark_elastic.data.tracker import RowGroupTracker

if TYPE_CHECKING:
    import pyarrow as pa
    from petastorm.transform import TransformSpec


@saved_as("spark_elastic.data")
class ParquetLoader(EngineLoader):
    """Iterates over the rest of the current epoch, yielding `dict[str, torch.Tensor]` with rows in the first dimension.

    Args:
        url: a directory or file; local, `file://`, or what fsspec opens with `storage_options`. Or a list of such: one dataset.
        batch_size, global_batch_size: rows a batch on each rank, or on all ranks together; exactly one of them. With the
            latter the same step holds the same rows in every world.
        shards: cut every global batch into this many shards, at least `max_np`, each of which is computed whole by one rank,
            in a loop over `model.parts(batch)`. The trained weights then have the same bits in every world.
        columns: names to read, and compiled patterns (`re.compile`) of whole names; default all that have a tensor. Partition
            columns of Hive paths are included.
        shards_strict: refuse to go on from a state that was made with other kernels (torch and its libraries, their
            instruction set, threads, device, deterministic switches), which leave other bits; False warns once.
        balance: "auto" has each rank's rows of the global batch, or its shards, follow how fast it computes them, on CPUs in a
            State with wrapped models; None keeps shares even.
        shuffle, shuffle_rows: permute row groups and shuffle rows within windows of `shuffle_rows` rows in all (0 or 1: row
            groups only). Unshuffled, rows come in the order of the files, and every rank reads all of them.
        seed: of everything that is random; the order depends on it and on the epoch only.
        filters: as pyarrow takes them; the rows that pass are counted when the loader is made. A warning tells where none does.
        predicate: one of `spark_elastic.data.predicates`, or of Petastorm's; asked of each row that `filters` pass.
        rowgroup_selector: one of `spark_elastic.data.selectors`, or of Petastorm's; only the row groups that it selects by
            Petastorm's index of the dataset are there then, before anything else is chosen.
        engine, engine_options: "arrow", or "petastorm" for its reader workers, with options as of `petastorm.make_reader`.
        transform: called with a pyarrow.Table of some rows of one row group; returns a table or a dict of arrays or
            tensors with as many rows. May run on another thread. The number of rows that it gets is not fixed.
        ngram: windows of consecutive rows, each of which then counts as a row; see `NGram`. Its fields are the columns that are
            read, unless a `transform` makes them of `columns`.
        drop_last: drop the rows that do not fill a last global batch.
        with_row_ids: add int64 `_row_group` (index in the manifest) and `_row` (as stored in the row group; of a window the
            first one).
        prefetch: batches read ahead; default 32,768 rows, or fewer where those take more than 64 MiB.
        pin_memory: default where CUDA is available.
        storage_options: options with which fsspec opens the dataset, such as credentials and endpoints.
        shard: a (rank, size), for use outside a State: that rank's part of each batch, without repeated batches.

    Lists come as dense [rows, n] tensors where all have one length, else as jagged nested tensors. No thread is made
    before it is iterated. Raises ValueError for arguments that do not fit, DataError where the dataset cannot be read.
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
        """Read the footers of all files, and to count rows the columns that `filters`, `predicate` and `ngram` look at.

        This blocks for as long as that takes. In a job all workers get what the first one has found. Raises ValueError or
        TypeError for arguments that do not fit, and DataError where the dataset cannot be read. Warns where no row is left.
        """
        check_switches(shuffle=shuffle, drop_last=drop_last, with_row_ids=with_row_ids)
        plan = BatchPlan(batch_size, global_batch_size, drop_last, shards, balance)
        seed = whole_number("seed", seed, 0)
        if prefetch is not None:
            prefetch = whole_number("prefetch", prefetch, 1)
        if engine not in tuple(ENGINES):  # what a user has given need not be hashable
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
        urls = as_urls(url)
        key = f"data/manifest/{json.dumps(urls)}/{key_of(storage_options)}"
        packed = pin(key, lambda: read_manifest(urls, storage_options=storage_options).encode())
        self.manifest = Manifest.decode(packed)
        locations = [locate(each, storage_options) for each in urls]
        total = int(self.manifest.rows.sum())
        if rowgroup_selector is not None:
            selection = Selection(self.manifest, locations, rowgroup_selector)
            self.manifest = selection.of(_once("selection", self.manifest, selection.key, selection.find))
        row_filter = None if filters is None and predicate is None else RowFilter(self.manifest, filters, predicate)
        rows = self.manifest.rows
        if row_filter is not None:
            count = functools.partial(row_filter.count, self.manifest, locations)
            rows = row_filter.expect(_once("filter", self.manifest, row_filter.key, count))
        if ngram is not None and not isinstance(ngram, NGram):
            raise ValueError(f"ngram must be an NGram, not {ngram!r}")
        if ngram is not None and transform is None:
            if columns is not None:
                raise ValueError("give columns= or ngram=, whose fields say which columns are read, not both")
            columns = ngram.columns
        reading = Reading(
            manifest=self.manifest,
            locations=locations,
            columns=columns,
            row_filter=row_filter,
            transform=transform,
            options=engine_options,
            storage_options=storage_options,
        )
        source = open_engine(engine, reading)
        if ngram is not None:
            finder = WindowFinder(ngram, reading)
            rows = np.frombuffer(_once("windows", self.manifest, finder.key, finder.count), "<i8")
            source = NGramEngine(finder, reading, source, self.manifest.where)
        if total and not rows.any():
            given = {
                "rowgroup_selector=": rowgroup_selector,
                "filters=": filters,
                "predicate=": predicate,
                "ngram=": ngram,
            }
            causes = " and ".join(name for name, value in given.items() if value is not None)
            warnings.warn(
                f"{self.manifest.name}: {causes} leave none of its {total} rows: the loader has no batches",
                stacklevel=2,
            )
        decoded = source.row_bytes
        if columns is not None and not columns and not with_row_ids:
            raise ValueError("columns=[] names no column; with with_row_ids=True it would be enough")
        stored = float(sum(group.uncompressed_bytes for group in self.manifest)) / max(1, int(self.manifest.rows.sum()))
        row_bytes = max(
            1.0, stored if ngram is None else stored * len(ngram.fields), decoded if self.manifest.unischema else 0.0
        )
        spec = choose_spec(
            groups=int(np.count_nonzero(rows)),
            batch=plan.smallest,
            seed=seed,
            shuffle=shuffle,
            shuffle_rows=shuffle_rows,
            row_bytes=row_bytes,
        )
        identity = {
            "kind": "parquet",
            "dataset": self.manifest.fingerprint,
            **({} if ngram is None else {"ngram": ngram.describe()}),
            "filters": row_filter.text if row_filter else "",
            "rows": int(rows.sum()),
            "seed": seed,
            "shuffle": shuffle,
            "order": describe(spec),
        }
        super().__init__(
            RowGroupTracker(rows, spec, plan),
            identity,
            source,
            self.manifest.where,
            row_bytes=decoded if decoded and transform is None else row_bytes,
            jagged=frozenset(name for name, length in self.manifest.list_lengths if length is None and ngram is None),
            row_ids=with_row_ids,
            prefetch=prefetch,
            pin_memory=pin_memory,
            shard=shard,
            shards_strict=shards_strict,
        )

    @classmethod
    def from_reader_arguments(cls, dataset_url: Urls | None = None, **arguments: Any) -> ParquetLoader:
        """Make the loader for a call of Petastorm's `make_reader` or `make_batch_reader`.

        dataset_url: the reader's URL, or list of URLs; `dataset_url_or_urls=` is the same. arguments: the reader's, by
        keyword, of both functions and of `petastorm.pytorch.DataLoader` (`batch_size`, `shuffling_queue_capacity`), and the
        loader's own, such as `global_batch_size`. Where both have an argument of a name, it means what it means to a reader:
        `shuffle_rows` is True or False.

        Raises ValueError for arguments that have no counterpart, saying what to do instead.
        """
        return cls(dataset_of(dataset_url, arguments), **loader_arguments(arguments))


def _once(what: str, manifest: Manifest, key: str | None, count: Callable[[], bytes]) -> bytes:
    """Count once for the whole job, if what is counted has a name by which other processes know it."""
    return count() if key is None else pin(f"data/{what}/{manifest.fingerprint}/{key}", count)
