"""Translates the arguments of Petastorm's ``make_reader`` and ``make_batch_reader`` to those of a ``ParquetLoader``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from spark_elastic.data.filesystem import Urls
from spark_elastic.data.ngram import NGram

logger = logging.getLogger("spark_elastic")

# Arguments of a reader or of a loader, by name.
Arguments: TypeAlias = dict[str, Any]

# Arguments without a counterpart, each with what to do instead.
_REFUSED = {
    "filesystem": "give a URL, with storage_options= if need be",
    "reader": "from_reader_arguments is called in place of both, the reader and the loader around it",
    "collate_fn": "a batch is a dict of tensors; make tensors of other columns in transform=, and change batches in the loop",
    "transform_fn": "a batch is a dict of tensors; make tensors of other columns in transform=, and change batches in the loop",
    "inmemory_cache_all": "each epoch reads the dataset; cache_type='local-disk' keeps what was decoded",
    "rows_capacity": "the dataset need not fit in memory; filters= and predicate= choose rows",
}
# Arguments of Petastorm's workers and caches, which become options of engine="petastorm". None of them changes which rows are
# read.
_OF_WORKERS = (
    "reader_pool_type",
    "workers_count",
    "results_queue_size",
    "zmq_copy_buffers",
    "hdfs_driver",
    "cache_type",
    "cache_location",
    "cache_size_limit",
    "cache_row_size_estimate",
    "cache_extra_settings",
)
_WITHOUT_MEANING = ("pyarrow_serialize", "shard_seed", "convert_early_to_numpy")


def dataset_of(dataset_url: Urls | None, arguments: Arguments) -> Urls:
    """Remove a reader's URL from its arguments and return it. Raises ValueError if it is missing or given twice."""
    given = [url for url in (dataset_url, arguments.pop("dataset_url_or_urls", None)) if url is not None]
    if len(given) != 1:
        raise ValueError("give the dataset's URL once, as dataset_url= or dataset_url_or_urls=")
    found: Urls = given[0]
    return found


def loader_arguments(arguments: Arguments) -> Arguments:
    """Return the arguments of a ``ParquetLoader`` for those of a reader. Arguments that readers do not have stay unchanged.

    Raises ValueError for what a loader does not do, saying what it does instead.
    """
    given = dict(arguments)
    for name, instead in _REFUSED.items():
        value = given.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name}= has no counterpart: {instead}")
    epochs = given.pop("num_epochs", 1)
    if epochs != 1:
        raise ValueError(
            f"num_epochs={epochs} has no counterpart: iterating a loader gives one epoch, and set_epoch(n) begins the next one"
        )
    found = {**_columns(given), **_order(given), **_shard(given), **_engine(given)}
    twice = sorted(found.keys() & given.keys())
    if twice:
        raise ValueError(f"{', '.join(twice)}= is given twice, as an argument of a reader and as one of a loader")
    return {**given, **found}


def _columns(given: Arguments) -> Arguments:
    fields = given.pop("schema_fields", None)
    if fields is None:
        return {}
    if isinstance(fields, NGram):
        return {"ngram": fields}
    if all(hasattr(fields, name) for name in ("fields", "delta_threshold", "timestamp_overlap")):
        return {"ngram": _ngram(fields)}
    if isinstance(fields, (str, Mapping)):
        raise ValueError(f"schema_fields must be a list of fields and patterns, or an NGram, not {fields!r}")
    return {"columns": [_column(field) for field in fields]}


def _ngram(theirs: Any) -> NGram:
    """Return our equivalent of Petastorm's NGram."""
    fields = {offset: [_column(field) for field in columns] for offset, columns in theirs.fields.items()}
    timestamp = theirs._timestamp_field
    return NGram(fields, theirs.delta_threshold, getattr(timestamp, "name", timestamp), theirs.timestamp_overlap)


def _column(field: Any) -> str | re.Pattern[str]:
    """Return the name of a UnischemaField. A string is a pattern, as in Petastorm."""
    return re.compile(field) if isinstance(field, str) else getattr(field, "name", field)


def _order(given: Arguments) -> Arguments:
    groups, rows = given.pop("shuffle_row_groups", True), given.pop("shuffle_rows", False)
    parts, queue = given.pop("shuffle_row_drop_partitions", 1), given.pop("shuffling_queue_capacity", 0)
    seed = given.pop("seed", None)
    if not groups and (rows or parts > 1 or queue):
        raise ValueError(
            "shuffle_row_groups=False does not go together with shuffled rows: a loader shuffles within windows over several row "
            "groups"
        )
    window = {} if rows or parts > 1 else {"shuffle_rows": queue}
    return {"shuffle": bool(groups), "seed": 0 if seed is None else seed, **(window if groups else {})}


def _shard(given: Arguments) -> Arguments:
    rank, size = given.pop("cur_shard", None), given.pop("shard_count", None)
    if (rank is None) != (size is None):
        raise ValueError(f"give cur_shard= and shard_count= together, or neither, not {rank} and {size}")
    return {} if rank is None else {"shard": (rank, size)}


def _engine(given: Arguments) -> Arguments:
    """Choose Petastorm's workers if a TransformSpec or a cache needs them, or if they are requested."""
    options = {name: given.pop(name) for name in _OF_WORKERS if name in given}
    spec = given.pop("transform_spec", None)
    dropped = [name for name in _WITHOUT_MEANING if given.pop(name, None)]
    needed = spec is not None or options.get("cache_type") not in (None, "null") or given.get("engine") == "petastorm"
    if not needed:
        dropped += options
    if dropped:
        logger.info("a ParquetLoader ignores %s, because one thread reads its rows", ", ".join(dropped))
    if not needed:
        return {}
    if given.pop("engine", "petastorm") != "petastorm":
        raise ValueError(
            "transform_spec= and cache_type= need engine='petastorm'; give transform= of a pyarrow.Table instead"
        )
    return {"engine": "petastorm", "engine_options": options, **({} if spec is None else {"transform": spec})}
