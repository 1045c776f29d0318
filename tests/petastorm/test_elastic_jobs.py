"""Whole elastic jobs on the oldest Spark that is tested, reading through Petastorm's own reader workers."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("petastorm", reason="needs the second environment, made by `make test`")

import networks
import pyarrow as pa
import pyarrow.parquet as pq
import training
from decommission import train_through_a_decommission

import spark_elastic
from spark_elastic.testing import inject, kill, kill_executor

ROWS = 500


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    cloudpickle.register_pickle_by_value(training)
    cloudpickle.register_pickle_by_value(networks)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"spark.ui.enabled": "false", "spark.decommission.enabled": "true"}
    session = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def test_every_row_counts_once_through_a_kill_with_petastorms_readers(spark: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array(range(ROWS), pa.int64())}), tmp_path / "part.parquet", row_group_size=60)
    with inject(kill(rank=1, step=3)):
        results = spark_elastic.run(
            training.count_rows,
            args=(tmp_path.as_uri(), ROWS, 2, {"global_batch_size": 32, "engine": "petastorm"}),
            spark=spark,
            min_np=1,
            max_np=2,
            num_proc=2,
        )
    for result in results:
        assert result["seen"] == pytest.approx([2.0] * ROWS)


@pytest.mark.filterwarnings("ignore")
def test_an_index_that_petastorm_builds_selects_the_row_groups_of_a_job(spark: Any, tmp_path: Path) -> None:
    from petastorm.etl.rowgroup_indexers import SingleFieldIndexer
    from petastorm.etl.rowgroup_indexing import build_rowgroup_index
    from petastorm_datasets import write_drive

    from spark_elastic.data.selectors import SingleIndexSelector

    url = write_drive(tmp_path / "drive").as_uri()
    build_rowgroup_index(url, spark.sparkContext, [SingleFieldIndexer("by id", "id")], hdfs_driver="libhdfs")
    settings = {"global_batch_size": 4, "rowgroup_selector": SingleIndexSelector("by id", [5, 25]), "columns": ["id"]}
    results = spark_elastic.run(training.count_rows, args=(url, 40, 1, settings), spark=spark, num_proc=2)
    for result in results:
        assert result["seen"] == pytest.approx([1.0 if row // 10 in (0, 2) else 0.0 for row in range(40)])


def test_training_lives_through_a_kill_of_worker_and_executor(spark: Any) -> None:
    events: list[dict[str, Any]] = []
    with inject(kill(rank=1, step=10), kill_executor(rank=0, step=20)):
        results = spark_elastic.run(
            training.count_steps, args=(30, 0.05), spark=spark, min_np=2, max_np=2, on_event=events.append
        )
    assert [event["event"] for event in events].count("fault_injected") == 2
    assert [result["counter"] for result in results] == [30.0] * 2
    assert len({result["digest"] for result in results}) == 1


def test_the_worker_of_a_decommissioned_executor_leaves_ahead_of_it_and_costs_no_step(
    spark: Any, tmp_path: Path
) -> None:
    train_through_a_decommission(spark, tmp_path)


@pytest.mark.filterwarnings("ignore:loading")
def test_a_pipeline_with_a_regressor_is_fitted_through_a_kill_and_saved(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import functions as f

    from spark_elastic.estimator import Store, TorchRegressor

    frame = (
        spark.range(ROWS).select(f.rand(1).alias("a"), f.rand(2).alias("b")).withColumn("y", f.col("a") - f.col("b"))
    )
    regressor = TorchRegressor(
        model=networks.dense(2), labelCol="y", batchSize=32, epochs=3, learningRate=1e-2, numProc=2, maxNp=2, verbose=0,
        validationFraction=0.2, store=Store.create(tmp_path / "store"),
    )  # fmt: skip
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), regressor])
    with inject(kill(rank=1, step=8)):
        model = pipeline.fit(frame)
    history = model.stages[1].history
    assert history[-1]["val_loss"] < history[0]["val_loss"]
    assert len({entry["rows"] for entry in history}) == 1
    model.write().save(str(tmp_path / "model"))
    scored = PipelineModel.load(str(tmp_path / "model")).transform(frame)
    assert scored.agg(f.avg(f.abs(f.col("y") - f.col("prediction")))).first()[0] < 0.4

    frame.select(f.array("a", "b").alias("features"), "y").write.parquet(str(tmp_path / "parquet"))
    on_parquet = regressor.copy({regressor.engine: "petastorm", regressor.validationFraction: 0.0})
    assert on_parquet.fit_on_parquet((tmp_path / "parquet").as_uri()).history[0]["rows"] == ROWS


def test_the_example_with_images_writes_them_by_petastorm_and_reads_them_without(spark: Any, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "images_petastorm.py"
    space = runpy.run_path(str(path))
    arguments = ["--data", tmp_path.as_uri(), "--write", "--images", "300", "--epochs", "2", "--workers", "2"]
    assert [result["images"] for result in space["main"](arguments)] == [600, 600]
