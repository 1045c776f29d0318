"""A dataset in Petastorm's format, written without Spark, and what Petastorm's own reader makes of it."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from petastorm import make_reader
from petastorm.codecs import NdarrayCodec, ScalarCodec
from petastorm.unischema import Unischema, UnischemaField
from pyspark.sql.types import DoubleType, FloatType, IntegerType, LongType, StringType

from spark_elastic.data.manifest import UNISCHEMA_KEY

SCHEMA = Unischema(
    "Drive",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("time", np.int32, (), ScalarCodec(IntegerType()), False),
        UnischemaField("speed", np.float32, (), ScalarCodec(FloatType()), False),
        UnischemaField("half", np.float64, (), ScalarCodec(DoubleType()), True),
        UnischemaField("pose", np.float32, (2,), NdarrayCodec(), False),
        UnischemaField("labels", np.int64, (None,), NdarrayCodec(), False),
        UnischemaField("car", np.str_, (), ScalarCodec(StringType()), False),
    ],
)


def write_drive(root: Path, files: int = 2, group: int = 10, rows: int = 40) -> Path:
    """Write ``rows`` rows, evenly over files, in row groups of ``group``; ``time`` grows by 1, and by 5 after each third row."""
    ids = np.arange(rows)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "time": pa.array(ids + 4 * (ids // 3), pa.int32()),
        "speed": pa.array(ids / 7, pa.float32()),
        "half": pa.array([None if row % 11 == 5 else row / 3 for row in range(rows)], pa.float64()),
        "pose": pa.array([_saved(np.array([row, -row], np.float32)) for row in range(rows)], pa.binary()),
        "labels": pa.array([_saved(np.arange(row, row + row % 4)) for row in range(rows)], pa.binary()),
        "car": pa.array([f"car {row % 5}" for row in range(rows)]),
    }
    table = pa.table(columns)
    root.mkdir(parents=True)
    each = rows // files
    for number in range(files):
        pq.write_table(table.slice(number * each, each), root / f"part-{number}.parquet", row_group_size=group)
    metadata = {
        UNISCHEMA_KEY: pickle.dumps(SCHEMA),
        b"dataset-toolkit.num_row_groups_per_file.v1": json.dumps(
            {f"part-{number}.parquet": -(-each // group) for number in range(files)}
        ).encode(),
    }
    pq.write_metadata(table.schema.with_metadata(metadata), root / "_common_metadata")
    return root


@contextlib.contextmanager
def reading(url: Any, make: Any = make_reader, **arguments: Any) -> Iterator[Any]:
    """Petastorm's reader of a URL or a list of them, in order and on one thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        places = [f"file://{each}" for each in url] if isinstance(url, list) else f"file://{url}"
        with make(places, reader_pool_type="dummy", shuffle_row_groups=False, **arguments) as reader:
            yield reader


def _saved(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()
