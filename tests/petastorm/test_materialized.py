"""A dataset that Petastorm itself wrote, through Spark: its own readers and workers on it, and our decoding of it."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_worlds import write_dataset
from reader_pools import POOLS, nothing_left

petastorm = pytest.importorskip("petastorm")

from petastorm import make_reader  # noqa: E402
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec  # noqa: E402
from petastorm.etl.dataset_metadata import materialize_dataset  # noqa: E402
from petastorm.predicates import in_pseudorandom_split  # noqa: E402
from petastorm.transform import TransformSpec  # noqa: E402
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row  # noqa: E402

from spark_elastic.data import ParquetLoader, predicates  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def materialized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that Petastorm itself wrote, through Spark."""
    pytest.importorskip("cv2")
    from pyspark.sql import SparkSession
    from pyspark.sql.types import (
        BooleanType,
        DecimalType,
        DoubleType,
        IntegerType,
        StringType,
        TimestampType,
    )  # fmt: skip

    schema = Unischema(
        "Everything",
        [
            UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
            UnischemaField("half", np.float64, (), ScalarCodec(DoubleType()), False),
            UnischemaField("plain", np.int64, (), None, False),
            UnischemaField("flag", np.bool_, (), ScalarCodec(BooleanType()), False),
            UnischemaField("name", np.str_, (), ScalarCodec(StringType()), False),
            UnischemaField("price", Decimal, (), ScalarCodec(DecimalType(20, 9)), False),
            UnischemaField("when", np.datetime64, (), ScalarCodec(TimestampType()), False),
            UnischemaField("matrix", np.float32, (3, 4), NdarrayCodec(), False),
            UnischemaField("packed", np.uint8, (5,), CompressedNdarrayCodec(), False),
            UnischemaField("ragged", np.int16, (None,), NdarrayCodec(), False),
            UnischemaField("png", np.uint8, (8, 6, 3), CompressedImageCodec("png"), False),
            UnischemaField("deep", np.uint16, (8, 6, 3), CompressedImageCodec("png"), False),
            UnischemaField("grey", np.uint16, (8, 6), CompressedImageCodec("png"), False),
            UnischemaField("jpeg", np.uint8, (16, 16, 3), CompressedImageCodec("jpeg", 90), False),
        ],
    )

    def row(i: int) -> dict[str, Any]:
        random = np.random.default_rng(i)
        return {
            "id": i, "half": i / 2, "plain": i * 10, "flag": i % 2 == 0, "name": f"r{i}", "price": Decimal(i),
            "when": datetime.datetime(2020, 1, 1), "matrix": np.full((3, 4), i, np.float32),
            "packed": np.full(5, i, np.uint8), "ragged": np.full(i % 4, i, np.int16),
            "png": random.integers(0, 255, (8, 6, 3)).astype(np.uint8),
            "deep": random.integers(0, 65535, (8, 6, 3)).astype(np.uint16),
            "grey": random.integers(0, 65535, (8, 6)).astype(np.uint16),
            "jpeg": random.integers(0, 255, (16, 16, 3)).astype(np.uint8),
        }  # fmt: skip

    root = tmp_path_factory.mktemp("materialized") / "everything"
    url = f"file://{root}"
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    try:
        with materialize_dataset(spark, url, schema, row_group_size_mb=1):
            rows = spark.sparkContext.parallelize([row(i) for i in range(90)], 5)
            encoded = rows.map(lambda values: dict_to_spark_row(schema, values))
            spark.createDataFrame(encoded, schema.as_spark_schema()).write.parquet(url)
    finally:
        spark.stop()
    return root


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with texts, times and arrays of text."""
    schema = Unischema(
        "Described",
        [
            UnischemaField("id", np.int64, (), None, False),
            UnischemaField("name", np.str_, (), None, True),
            UnischemaField("price", Decimal, (), None, False),
            UnischemaField("time", np.datetime64, (), None, False),
            UnischemaField("day", np.datetime64, (), None, True),
            UnischemaField("tags", np.str_, (None,), NdarrayCodec(), True),
            UnischemaField("words", np.bytes_, (None,), CompressedNdarrayCodec(), False),
        ],
    )
    rows = range(40)
    tags = [np.array([f"t{place}" for place in range(row % 4)], "U4") for row in rows]
    encoded = [schema.tags.codec.encode(schema.tags, tag) for tag in tags]
    words = [schema.words.codec.encode(schema.words, tag.astype("S4")) for tag in tags]
    time = datetime.datetime(2021, 1, 1)
    table = pa.table(
        {
            "id": rows,
            "name": [f"r{row}" if row % 5 else None for row in rows],
            "price": [Decimal(row) / 4 for row in rows],
            "time": pa.array([time + datetime.timedelta(seconds=row, microseconds=row) for row in rows]),
            "day": pa.array([time.date() + datetime.timedelta(row % 6) if row % 7 else None for row in rows]),
            "tags": pa.array([bytes(tag) if row % 9 else None for row, tag in enumerate(encoded)], pa.binary()),
            "words": pa.array(map(bytes, words), pa.binary()),
        }
    )
    root = tmp_path_factory.mktemp("described") / "dataset"
    root.mkdir()
    pq.write_table(table, root / "part-0.parquet", row_group_size=16)
    metadata = {
        b"dataset-toolkit.unischema.v1": pickle.dumps(schema),
        b"dataset-toolkit.num_row_groups_per_file.v1": json.dumps({"part-0.parquet": 3}).encode(),
    }
    pq.write_metadata(table.schema.with_metadata(metadata), root / "_common_metadata")
    return root


@pytest.mark.parametrize("name", ["id", "name", "price", "time", "day", "tags", "words"])
def test_predicates_get_the_values_of_petastorms_reader_and_split_by_them_alike(described: Path, name: str) -> None:
    seen: dict[int, Any] = {}

    def see(row: int, value: Any) -> bool:
        seen[int(row)] = value
        return True

    ParquetLoader(described, 16, columns=["id"], predicate=predicates.in_lambda(["id", name], see))
    with make_reader(f"file://{described}", reader_pool_type="dummy") as reader:
        expected = {int(row.id): getattr(row, name) for row in reader}
    assert seen.keys() == expected.keys()
    for row, value in expected.items():
        assert str(seen[row]) == str(value)
        if name != "name":  # a str_ there, and a str here
            assert getattr(seen[row], "dtype", None) == getattr(value, "dtype", None)
    split = in_pseudorandom_split([0.5, 0.3], 0, name)
    with make_reader(f"file://{described}", reader_pool_type="dummy", predicate=split) as reader:
        passing = sorted(int(row.id) for row in reader)
    ours = ParquetLoader(described, 16, columns=["id"], predicate=predicates.in_pseudorandom_split([0.5, 0.3], 0, name))
    assert sorted(row for batch in ours for row in batch["id"].tolist()) == passing


@pytest.mark.parametrize("options", POOLS)
def test_both_engines_give_the_same_batches_of_a_petastorm_dataset(materialized: Path, options: dict[str, Any]) -> None:
    ours = list(ParquetLoader(materialized, 16, with_row_ids=True))
    theirs = list(ParquetLoader(materialized, 16, with_row_ids=True, engine="petastorm", engine_options=options))
    assert len(ours) == len(theirs) == 6
    assert {"id", "half", "plain", "flag", "matrix", "packed", "ragged", "png", "deep", "grey", "jpeg"} < set(ours[0])
    for one, other in zip(ours, theirs, strict=True):
        assert set(one) == set(other)
        for name, values in one.items():
            assert values.dtype == other[name].dtype, name
            if values.is_nested or other[name].is_nested:
                assert [part.tolist() for part in values.unbind()] == [part.tolist() for part in other[name].unbind()]
            else:
                assert torch.equal(values, other[name]), name


def test_our_decoding_is_that_of_petastorms_reader(materialized: Path) -> None:
    with make_reader(f"file://{materialized}", reader_pool_type="dummy") as reader:
        expected = {int(row.id): row for row in reader}
    for batch in ParquetLoader(materialized, 16):
        for place, row in enumerate(batch["id"].tolist()):
            for name in ("matrix", "packed", "png", "deep", "grey", "jpeg"):
                assert np.array_equal(batch[name][place].numpy(), getattr(expected[row], name)), name


def test_a_transform_spec_runs_in_the_workers(tmp_path: Path, materialized: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 20])
    spec = TransformSpec(lambda frame: frame.assign(y=frame.id * 2), edit_fields=[("y", np.int64, (), False)])
    for batch in ParquetLoader(root, 16, engine="petastorm", transform=spec):
        assert torch.equal(batch["y"], batch["id"] * 2)

    def grow(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "sum": row["matrix"].sum(dtype=np.float64)}

    spec = TransformSpec(grow, edit_fields=[("sum", np.float64, (), False)], selected_fields=["id", "sum"])
    for batch in ParquetLoader(materialized, 16, engine="petastorm", transform=spec):
        assert torch.equal(batch["sum"], batch["id"].double() * 12)
