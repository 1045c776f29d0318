"""A dataset that Petastorm itself wrote, through Spark: its own readers and workers on it, and our decoding of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_worlds import write_dataset
from reader_pools import POOLS, nothing_left

petastorm = pytest.importorskip("petastorm")

from petastorm import make_reader  # noqa: E402
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec  # noqa: E402
from petastorm.etl.dataset_metadata import materialize_dataset  # noqa: E402
from petastorm.transform import TransformSpec  # noqa: E402
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row  # noqa: E402

from spark_elastic.data import ParquetLoader  # noqa: E402

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
