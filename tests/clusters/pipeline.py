"""What a user submits: ``spark-submit … pipeline.py FOLDER`` reads, joins and writes with SQL, fits, scores, and ends.

The fit goes on until ``FOLDER/stop`` exists. What came out is in ``FOLDER/result.json``, as in cluster mode nobody sees what the
driver prints. Each worker tells in ``FOLDER/workers/<its pid>`` which world it trains in, see ``reports.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import spark_elastic as se
from spark_elastic.estimator import Store, TorchEstimator

ROWS = 2000
MOST_WORKERS = 4
RELEASE_SECONDS = 90.0


class Net(torch.nn.Module):
    """Defined in the script: executors know it by value only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor, fee: torch.Tensor) -> torch.Tensor:
        return self.body(torch.stack([a, b, fee], 1)).squeeze(1)


class UntilTold:
    """Ends the fit after the epoch in which a file has come into being."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_epoch_end(self, ctx: Any) -> None:
        if os.path.exists(self.path):
            ctx.stop()


def step_and_report(folder: str) -> Any:
    """Make the trainStep, which takes a while, as that of a larger model does."""

    def step(model: Any, batch: Any, ctx: Any) -> Any:
        own = f"{folder}/workers/{os.getpid()}"
        with open(f"{own}.new", "w") as file:
            file.write(f"{se.generation()} {se.rank()} {se.size()}")
        os.replace(f"{own}.new", own)
        time.sleep(0.02)
        score = model(batch["a"], batch["b"], batch["fee"])
        return torch.nn.functional.binary_cross_entropy_with_logits(score, batch["label"])

    return step


def prepare(spark: SparkSession, folder: str) -> DataFrame:
    """Write two tables, join them with SQL, write what comes out, and read it again."""
    orders = spark.range(ROWS, numPartitions=4).select(
        "id", (f.col("id") % 7).alias("shop"), f.rand(1).alias("a"), f.rand(2).alias("b")
    )
    orders.write.parquet(f"{folder}/orders")
    spark.range(7).select(f.col("id").alias("shop"), (f.col("id") / 10).alias("fee")).write.parquet(f"{folder}/shops")
    for name in ("orders", "shops"):
        spark.read.parquet(f"{folder}/{name}").createOrReplaceTempView(name)
    joined = spark.sql(
        "SELECT id, a, b, fee, CAST(a + fee > b AS DOUBLE) AS label FROM orders JOIN shops USING (shop) ORDER BY id"
    )
    joined.write.parquet(f"{folder}/joined")
    return spark.read.parquet(f"{folder}/joined")


def wait_for_release(spark: SparkSession) -> float:
    """Return the seconds until Spark has given the last executor back."""
    began = time.monotonic()
    while spark.sparkContext._jsc.sc().getExecutorIds().size():
        assert time.monotonic() < began + RELEASE_SECONDS, "Spark keeps executors that have nothing to do"
        time.sleep(0.1)
    return time.monotonic() - began


def main(folder: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    frame = prepare(spark, folder)
    (Path(folder) / "workers").mkdir()
    estimator = TorchEstimator(
        model=Net(), trainStep=step_and_report(folder), featureCols=["a", "b", "fee"], labelCols=["label"],
        outputCols=["score"], learningRate=0.05, globalBatchSize=40, epochs=10_000, minNp=1, maxNp=MOST_WORKERS, adaptiveNp=False,
        store=Store.create(f"file://{folder}/store"), callbacks=UntilTold(f"{folder}/stop"), verbose=0,
    )  # fmt: skip
    fitted = estimator.fit(frame)
    release = wait_for_release(spark)
    # Spark has no executor now, and asks for some again.
    right = fitted.transform(frame).where("(score > 0) = (label = 1)").count()
    result = {
        "rows": sorted({entry["rows"] for entry in fitted.history}),
        "sizes": sorted({size for entry in fitted.history for size in entry["sizes"]}),
        "right": right / ROWS,
        "release": [release, wait_for_release(spark)],
    }
    (Path(folder) / "result.json").write_text(json.dumps(result))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
