"""Writes a DataFrame's columns once to the store as Parquet, checked, and spread over row groups for all workers.

Each writer has a folder of its own, and writes a last file that marks it as complete. So writers of the same data do not
collide, and no file system has to rename folders. Within a process, one fit at a time writes the same data. The next writer of
the same data removes what a dead writer has left behind, once it is certain that nothing writes there any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, Window
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, BinaryType, DataType, FloatType, StructType

from spark_elastic._text import shown
from spark_elastic.data import read_manifest
from spark_elastic.errors import DataError
from spark_elastic.estimator.finite import SHOWN
from spark_elastic.estimator.frame import Facts, as_numbers, column, in_rows, shown_columns
from spark_elastic.estimator.identity import content_of, identity_by_plan, identity_by_rows, identity_of_content, marked
from spark_elastic.estimator.store import Store

logger = logging.getLogger("spark_elastic")

ROW_GROUP_BYTES = 16 * 2**20
FILES_A_WORKER = 4
# How many columns one aggregate looks at. The code that Spark makes for more does not fit into one method of the JVM's compiler.
CHUNK = 50
# How many numbers a row may draw.
_DRAWS = 2**32
# Spark's tasks keep writing files. If no file has changed for this long, the job that wrote them is dead.
ABANDONED_SECONDS = 24 * 3600.0
_COMPLETE = "_complete.json"
_FACTS = ("nulls", "nans", "infinite", "min", "max", "fraction")
_SPLIT = "_split"
_KEY = "__spark_elastic_key"
_STRATUM = "__spark_elastic_stratum"


@dataclass(frozen=True)
class Split:
    """Selects the rows for validation: a random fraction, or the rows where the column ``indicator`` is true.

    stratify: a column of classes; the fraction is taken of each class.
    """

    fraction: float = 0.0
    indicator: str | None = None
    seed: int = 0
    stratify: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether any rows are held back for validation."""
        return self.fraction > 0 or self.indicator is not None

    def __str__(self) -> str:
        return f"validationIndicatorCol={self.indicator!r}" if self.indicator else f"validationFraction={self.fraction}"


@dataclass(frozen=True)
class Wanted:
    """The data that a fit asks for: columns of a DataFrame, whose rows are split.

    parts: the number of files, of training and of validation. by_content: have the rows of each file depend on the data only,
    and not on how Spark divides them; a split always does. described: the columns of numbers whose facts are wanted.
    """

    frame: DataFrame
    names: Sequence[str]
    split: Split
    parts: int
    by_content: bool = False
    described: Collection[str] = ()

    @property
    def numbers(self) -> DataFrame:
        """The rows as they are written, in a form that Spark feeds to the UDF for bytes if a column has bytes."""
        schema = self.frame.schema
        has_bytes = any(isinstance(schema[name].dataType, BinaryType) for name in self.names)
        return (in_rows(self.frame, self.names) if has_bytes else self.frame).select(*self.columns)

    @property
    def columns(self) -> list[Column]:
        """The columns as they are written, and those by which the rows are split."""
        schema, indicator, stratify = self.frame.schema, self.split.indicator, self.split.stratify
        found = [as_numbers(name, schema[name].dataType) for name in self.names]
        if indicator is not None:
            found.append(f.coalesce(column(indicator).cast("boolean").cast("int"), f.lit(0)).alias(_SPLIT))
        return [*found, column(stratify).alias(_STRATUM)] if stratify else found


@dataclass(frozen=True)
class Dataset:
    """Written data: their URL in the store, and the facts that were observed while writing.

    facts: for each column that was to be described, and for lists, the number of nulls and NaN, the least and largest value (for
    lists, the least and largest length), and the largest number with a fraction, which is None for lists and for columns without
    fractions. identity: the name by which the data are recognized later.
    """

    url: str
    rows: int
    validation_rows: int
    facts: Facts = field(default_factory=dict)
    identity: str = ""

    @property
    def training_url(self) -> str:
        """The folder of the rows to train on."""
        return f"{self.url}/{_SPLIT}=0"

    @property
    def validation_url(self) -> str | None:
        """The folder of the rows for validation; None if there are none."""
        return f"{self.url}/{_SPLIT}=1" if self.validation_rows else None


_guard = threading.Lock()
# A lock for each identity's folder. Its holder may change ``_users`` of the data in that folder.
_locks: dict[str, threading.Lock] = {}
_users: Counter[str] = Counter()


def check_names(columns: Sequence[str]) -> None:
    """Raise ValueError for a column name that the store itself uses."""
    for name in columns:
        if name.lower() in (_SPLIT, _KEY, _STRATUM):  # Spark ignores the case of names
            raise ValueError(
                f"column {name!r} cannot be trained on, because the store has a column of its own under this name: rename it, "
                f"df.withColumnRenamed({name!r}, …)"
            )


def identity_of(wanted: Wanted) -> str:
    """Return the identity of the data that ``written`` makes. Runs a Spark job if the plan does not determine the rows."""
    content = identity_by_plan(wanted.frame, wanted.columns) or identity_by_rows(wanted.numbers)
    return _with_split(content, wanted.split)


def is_written(wanted: Wanted, store: Store, url: str) -> bool:
    """Whether the data at a URL of the store have the rows of this DataFrame. Runs two Spark jobs if all of them are there."""
    found = _read(store, url)
    if found is None or not _is_whole(store, found):
        return False
    mine = replace(wanted, split=replace(wanted.split, stratify=None)).numbers
    kept = wanted.frame.sparkSession.read.parquet(store.spark_url(url))
    if not set(mine.columns) <= set(kept.columns):
        return False
    kept = kept.select(*map(column, mine.columns))
    return mine.agg(*content_of(mine)).first() == kept.agg(*content_of(kept)).first()


def _with_split(content: str, split: Split) -> str:
    how = f"{split.fraction}/{split.seed}/{split.indicator}" if split.is_wanted else ""
    how += f"/{split.stratify}" if split.stratify else ""
    return f"{content[:5]}{hashlib.blake2b(f'{content}/{how}'.encode(), digest_size=16).hexdigest()}"


@contextlib.contextmanager
def written(
    wanted: Wanted,
    store: Store,
    identity: str,
    *,
    reuse: bool = True,
    known: str | None = None,
    keep_on_failure: bool = False,
) -> Iterator[Dataset]:
    """Write the wanted data, or find them already written. If the store keeps no data, they are deleted at the end.

    reuse: accept data that were already written under ``identity``; data that changed while they were written get another
    identity. known: the URL of a continuing run's data; only these are acceptable. keep_on_failure: keep the data for a later
    continuation of the run. Raises ValueError for an empty DataFrame, for nulls and NaN (naming the column), if no row is left
    to train or to validate on, and if the data at ``known`` are gone.
    """
    wanted = replace(wanted, by_content=wanted.by_content or wanted.split.is_wanted)
    own = f"{store.data_url}/{identity}-{wanted.parts}{'-content' * wanted.by_content}"
    folder = known.rpartition("/")[0] if known else own
    with _guard:
        lock = _locks.setdefault(folder, threading.Lock())
    with lock:
        if known is not None:
            found = _read(store, known)
            if found is None:
                raise ValueError(
                    f"the run cannot go on: its data in {known} are gone; a store with keep=True, or with data in keep, has them"
                )
            if not _is_whole(store, found):
                raise ValueError(
                    f"the run cannot go on: of its data in {known} files are missing; choose another runId"
                )
        else:
            found = _find(store, folder, identity, wanted.described) if reuse else None
            found = found or _write(wanted, store, folder, identity)
        _users[found.url] += 1
    failed = True
    try:
        yield found
        failed = False
    finally:
        with lock:
            _users[found.url] -= 1
            if not _users[found.url] and "data" not in store.keep and not (failed and keep_on_failure):
                _delete(store, found.url)


def _find(store: Store, folder: str, identity: str, described: Collection[str]) -> Dataset | None:
    """Find data that will stay, because the store keeps them or a fit in this process uses them. Remove abandoned data.

    Where a fit has written the same columns and described others of them, the data are written again.
    """
    broken = []
    for token in store.files.names(store.spark_url(folder)):
        found = _read(store, url := f"{folder}/{token}")
        if found is None:
            with contextlib.suppress(OSError):  # the writer is still working, and changes the folder
                if store.files.newest(store.spark_url(url)) < time.time() - ABANDONED_SECONDS:
                    _delete(store, url)
        elif found.identity == identity and ("data" in store.keep or _users[url]):
            if not _is_whole(store, found):
                broken.append(url)
            elif found.facts.keys() >= set(described):
                return found
    for url in broken:
        logger.warning(
            "of the data that an earlier fit has written to %s, files are missing; they are written again", shown(url)
        )
    return None


def _is_whole(store: Store, data: Dataset) -> bool:
    """Whether all rows that were written are there. What cleans up a store may have taken a part of its files."""
    rows = 0
    for url in filter(None, (data.training_url, data.validation_url)):
        if not any(name.endswith(".parquet") for name in store.files.names(store.spark_url(url))):
            return False
        try:
            rows += int(read_manifest(store.worker_url(url), storage_options=store.storage_options).rows.sum())
        except DataError:
            return True  # the fit itself says why they cannot be read from here
    return rows == data.rows


def _read(store: Store, url: str) -> Dataset | None:
    """Return the data in a folder; None if the folder was not written, or not completely."""
    marker = store.spark_url(f"{url}/{_COMPLETE}")
    return Dataset(**json.loads(store.files.read(marker))) if store.files.exists(marker) else None


def _delete(store: Store, url: str) -> None:
    """Delete one writer's data, and its identity's folder if that is then empty."""
    files, folder = store.files, store.spark_url(url.rpartition("/")[0])
    files.delete(store.spark_url(url))
    if not files.names(folder):
        files.delete(folder)


def _write(wanted: Wanted, store: Store, folder: str, identity: str) -> Dataset:
    url = f"{folder}/{secrets.token_hex(8)}"
    target = store.spark_url(url)
    numbers = wanted.numbers
    observation = Observation()
    by_rows = identity.startswith("rows-")
    told, untold = _told_apart(numbers.schema, wanted)
    spread = _spread(numbers, wanted)
    aggregates = [*_observed(spread.schema, told, untold), *(content_of(numbers) if by_rows else ())]
    observed = spread.drop(_KEY).observe(observation, *aggregates)
    try:
        # A session's limit of rows in a file would give other files, and thereby another order of rows.
        options = {"parquet.block.size": ROW_GROUP_BYTES, "maxRecordsPerFile": 0}
        writer = observed.drop(_STRATUM).write.options(**options)
        writer.partitionBy(_SPLIT).parquet(target)
        seen = observation.get
        suspects = next((chunk for place, chunk in enumerate(untold) if seen[f"good_{place}"] < seen["rows"]), [])
        bad = _counted(wanted.frame.sparkSession.read.parquet(target), suspects) if suspects else {}
        dataset = _checked(wanted, url, seen, {**_facts_in(seen, told), **bad})
        content = identity_of_content(numbers.schema, seen) if by_rows else None
        if identity.startswith("plan-"):
            content = identity_by_plan(wanted.frame, wanted.columns) or ""
        is_still = content is None or _with_split(content, wanted.split) == identity
        dataset = replace(dataset, identity=identity if is_still else f"new-{secrets.token_hex(8)}")
        store.files.write(f"{target}/{_COMPLETE}", json.dumps(asdict(dataset)).encode())
    except BaseException:
        _delete(store, url)
        raise
    return dataset


def _spread(numbers: DataFrame, wanted: Wanted) -> DataFrame:
    """Spread rows over files, sorted by a hash, so that files have them in one order however Spark's shuffle delivers them."""
    split, key = wanted.split, f.xxhash64(*_hashed(numbers, wanted))
    divided = _stratified(numbers, wanted) if split.stratify else numbers
    if wanted.by_content:
        spread = divided.withColumn(_KEY, key).repartition(wanted.parts, _KEY)
    else:
        spread = divided.repartition(wanted.parts).withColumn(_KEY, key)
    spread = spread.sortWithinPartitions(_KEY)
    if not split.is_wanted:
        return spread.withColumn(_SPLIT, f.lit(0))
    if split.indicator is None and split.stratify is None:
        spread = spread.withColumn(_SPLIT, (_drawn(split.seed) < split.fraction).cast("int"))
    return spread.sortWithinPartitions(_SPLIT, _KEY)


def _hashed(numbers: DataFrame, wanted: Wanted) -> list[Column]:
    schema = numbers.schema
    return [part for name in wanted.names for part in marked(schema[name])]


def _drawn(seed: int) -> Column:
    """Return a number from 0 to 1 for each row, which depends on the seed and on the data, and not on how they are divided."""
    # Equal rows are numbered, so that they do not all get the same.
    number = f.row_number().over(Window.partitionBy(_KEY).orderBy(_KEY))
    return f.pmod(f.xxhash64(f.lit(seed), f.col(_KEY), number), f.lit(_DRAWS)) / _DRAWS


def _stratified(numbers: DataFrame, wanted: Wanted) -> DataFrame:
    """Hold back the fraction of each class, rounded, but at least one of its rows; a class of one row is trained on.

    The choice of rows depends on their content and the seed, so that the same data are always divided in the same way.
    """
    of_class = Window.partitionBy(_STRATUM)
    rows = f.count(f.lit(1)).over(of_class)
    held_back = f.least(rows - 1, f.greatest(f.lit(1), f.round(rows * wanted.split.fraction)))
    shuffled = f.xxhash64(f.lit(wanted.split.seed), *_hashed(numbers, wanted))
    place = f.row_number().over(of_class.orderBy(shuffled))
    return numbers.withColumn(_SPLIT, (place <= held_back).cast("int"))


def _told_apart(schema: StructType, wanted: Wanted) -> tuple[list[str], list[list[str]]]:
    """Divide columns into those whose facts are wanted, and chunks of the others, whose values only have to be finite.

    A wide frame has thousands of the others. With six aggregates for each, Spark would take minutes to compile the plan.
    """
    told = [name for name in wanted.names if name in wanted.described or isinstance(schema[name].dataType, ArrayType)]
    others = [name for name in wanted.names if name not in set(told)]
    return told, [others[start : start + CHUNK] for start in range(0, len(others), CHUNK)]


def _observed(schema: StructType, names: Sequence[str], chunks: Sequence[Sequence[str]]) -> list[Column]:
    """Return aggregates that the writing pass computes: facts of the named columns, and the good rows of each chunk of others."""
    wanted = [f.count(f.lit(1)).alias("rows"), f.sum(column(_SPLIT)).alias("validation_rows")]
    for place, chunk in enumerate(chunks):
        are_finite = [_is_finite(name, schema[name].dataType) for name in chunk]
        wanted.append(f.count_if(_all_of(are_finite)).alias(f"good_{place}"))
    return wanted + _facts(schema, names)


def _all_of(conditions: Sequence[Column]) -> Column:
    """Return whether all conditions hold, as a balanced tree: Spark Connect's messages nest at most a hundred levels."""
    if len(conditions) == 1:
        return conditions[0]
    half = len(conditions) // 2
    return _all_of(conditions[:half]) & _all_of(conditions[half:])


def _is_finite(name: str, kind: DataType) -> Column:
    """Whether a value is a finite number. For Spark, NaN is larger than infinity, and nothing is known of null."""
    return f.abs(column(name)) < float("inf") if isinstance(kind, FloatType) else column(name).isNotNull()


def _counted(written: DataFrame, names: Sequence[str]) -> Facts:
    """Return the facts of columns of written data of which some are bad."""
    seen = written.agg(*_facts(written.schema, names)).first()
    assert seen is not None
    return _facts_in(seen.asDict(), names)


def _facts_in(seen: Mapping[str, Any], names: Sequence[str]) -> Facts:
    return {name: {key: seen[f"{key}_{place}"] for key in _FACTS} for place, name in enumerate(names)}


def _facts(schema: StructType, names: Sequence[str]) -> list[Column]:
    wanted = []
    for place, name in enumerate(names):
        values, kind = column(name), schema[name].dataType
        is_list = isinstance(kind, ArrayType)
        is_float = isinstance(kind.elementType if isinstance(kind, ArrayType) else kind, FloatType)
        null = values.isNull()
        nan, infinite = (bad(values) if is_float and not is_list else f.lit(False) for bad in (f.isnan, _is_infinite))
        if is_list:
            null = null | f.exists(values, lambda value: value.isNull())
            nan, infinite = (f.exists(values, bad) if is_float else f.lit(False) for bad in (f.isnan, _is_infinite))
        measure = f.size(values) if is_list else values.cast("double")
        wanted += [
            f.sum(null.cast("int")).alias(f"nulls_{place}"),
            f.sum(f.coalesce(nan, f.lit(False)).cast("int")).alias(f"nans_{place}"),
            f.sum(f.coalesce(infinite, f.lit(False)).cast("int")).alias(f"infinite_{place}"),
            f.min(measure).alias(f"min_{place}"),
            f.max(measure).alias(f"max_{place}"),
            f.max(f.when(measure % 1 != 0, measure)).alias(f"fraction_{place}"),
        ]
    return wanted


def _is_infinite(value: Column) -> Column:
    return f.abs(value) == float("inf")


def _checked(wanted: Wanted, url: str, seen: Mapping[str, Any], facts: Facts) -> Dataset:
    rows, validation_rows = int(seen["rows"]), int(seen["validation_rows"] or 0)
    if not rows:
        raise ValueError("the DataFrame has no rows")
    for name in filter(facts.__contains__, wanted.names):
        found = facts[name]
        for key, word in (("nulls", "nulls"), ("nans", "NaN"), ("infinite", "infinite values (as 32-bit floats)")):
            if found[key]:
                raise ValueError(
                    f"column {name!r} has {word} in {found[key]} of {rows} rows{_example(wanted.frame, name)}; fill them "
                    "(Imputer, fillna) or drop the rows"
                )
    for left, purpose in ((validation_rows, "validation"), (rows - validation_rows, "training")):
        if wanted.split.is_wanted and not left:
            raise ValueError(f"{wanted.split} leaves no row of {rows} for {purpose}")
    return Dataset(url, rows, validation_rows, facts)


def _example(frame: DataFrame, name: str) -> str:
    """Describe the first row whose value in this column is not a finite number, by the values of its other columns."""
    schema = frame.schema
    numbers = frame.withColumn(_KEY, as_numbers(name, schema[name].dataType))
    kind, values = numbers.schema[_KEY].dataType, column(_KEY)
    is_array = isinstance(kind, ArrayType)
    is_float = isinstance(kind.elementType if isinstance(kind, ArrayType) else kind, FloatType)

    def is_bad(value: Column) -> Column:
        return value.isNull() | f.isnan(value) | _is_infinite(value) if is_float else value.isNull()

    bad = values.isNull() | f.exists(values, is_bad) if is_array else is_bad(values)
    shown = [name, *(other for other in shown_columns(frame, schema) if other != name)][:SHOWN]
    row = numbers.where(bad).select(*map(column, shown)).first()
    if row is None:  # the DataFrame yields other rows each time it is computed
        return ""
    return f", first in the row {', '.join(f'{key}={str(value)[:60]}' for key, value in zip(shown, row, strict=True))}"
