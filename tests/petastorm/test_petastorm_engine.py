"""Petastorm's own reader workers under our order, and our decoding against Petastorm's."""

from __future__ import annotations

import collections
import datetime
import operator
import os
import threading
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from data_worlds import World, make_table, write_dataset

petastorm = pytest.importorskip("petastorm")

from petastorm import make_reader  # noqa: E402
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec  # noqa: E402
from petastorm.etl.dataset_metadata import materialize_dataset  # noqa: E402
from petastorm.transform import TransformSpec  # noqa: E402
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row  # noqa: E402

from spark_elastic.data import ParquetLoader  # noqa: E402
from spark_elastic.errors import DataError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

POOLS: list[dict[str, Any]] = [
    {"reader_pool_type": "dummy"},
    {"reader_pool_type": "thread", "workers_count": 3},
    {"reader_pool_type": "process", "workers_count": 2},
]


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
def nothing_stays_behind() -> Any:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("spark-elastic")] == []
    left = set(psutil.Process().children(recursive=True)) - before
    assert [process.name() for process in left if process.name().startswith("python")] == []


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


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


@pytest.mark.parametrize("options", POOLS[:2])
def test_every_row_counts_once_through_resets(tmp_path: Path, options: dict[str, Any]) -> None:
    root = write_dataset(tmp_path / "d", [30, 1, 57, 12, 100, 3], files=3)
    world = World(
        lambda: ParquetLoader(
            root, global_batch_size=24, engine="petastorm", engine_options=options, columns=["id", "x"]
        ),
        3,
    )
    world.same_steps = True
    for size, survivors in ((2, 1), (4, 2), (1, 0)):
        world.step()
        world.commit()
        world.step()
        world.form(size, survivors)
    while world.step():
        world.commit()
    world.close()
    assert world.counted == collections.Counter({(0, row): 1 for row in range(203)})


def test_rows_come_in_the_same_order_from_both_engines(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 1, 57, 12, 100, 3], files=3)
    assert ids(ParquetLoader(root, 16, engine="petastorm")) == ids(ParquetLoader(root, 16))


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


def test_a_transform_spec_that_drops_rows_is_an_error(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30])
    spec = TransformSpec(lambda frame: frame[frame.id > 3])
    with pytest.raises(DataError, match="Petastorm delivered 26 rows of 30"):
        ids(ParquetLoader(root, 16, engine="petastorm", transform=spec))


@pytest.mark.parametrize("options", POOLS)
def test_an_error_in_a_worker_names_the_row_group(tmp_path: Path, options: dict[str, Any]) -> None:
    root = write_dataset(tmp_path / "d", [30], files=1)
    spec = TransformSpec(operator.itemgetter("nowhere"))
    with pytest.raises(DataError, match=r"part-0\.parquet, row group 0: KeyError: 'nowhere'"):
        ids(ParquetLoader(root, 16, engine="petastorm", engine_options=options, transform=spec))


def test_a_file_that_was_replaced_is_named(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 30])
    loader = ParquetLoader(root, 16, engine="petastorm")
    pq.write_table(make_table(np.arange(30) + 7), root / "part-1.parquet")
    with pytest.raises(DataError, match=r"part-1\.parquet has changed since the dataset was listed"):
        ids(loader)


def test_filters_pass_the_same_rows_in_both_engines(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 1, 57, 12])
    filters = [[("id", "<", 10)], [("id", ">", 60)]]
    theirs = ParquetLoader(root, 16, engine="petastorm", filters=filters)
    assert theirs.rows_total == 49
    assert ids(theirs) == ids(ParquetLoader(root, 16, filters=filters))


def test_a_local_disk_cache_gives_the_same_rows_the_second_time(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [30, 30])
    cache = {
        "cache_type": "local-disk", "cache_location": str(tmp_path / "cache"), "cache_size_limit": 10**8,
        "cache_row_size_estimate": 100,
    }  # fmt: skip
    loader = ParquetLoader(root, 16, engine="petastorm", engine_options=cache)
    first = ids(loader)
    assert os.listdir(tmp_path / "cache")
    assert ids(loader) == first


def test_wrong_arguments_are_value_errors(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [3])
    with pytest.raises(ValueError, match="takes a petastorm"):
        ParquetLoader(root, 1, engine="petastorm", transform=lambda table: table)
    with pytest.raises(ValueError, match="not nope"):
        ParquetLoader(root, 1, engine="petastorm", engine_options={"nope": 1})
    with pytest.raises(ValueError, match="'nope' is not in the dataset"):
        ParquetLoader(root, 1, engine="petastorm", columns=["nope"])
    with pytest.raises(ValueError, match="engine_options are for engine='petastorm'"):
        ParquetLoader(root, 1, engine_options={"workers_count": 1})


def test_thirty_epochs_of_a_thread_pool_lose_no_row(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "d", [5] * 40, files=8)
    loader = ParquetLoader(root, 16, engine="petastorm", engine_options={"workers_count": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(30):
            loader.set_epoch(epoch)
            assert sorted(ids(loader)) == list(range(200))
