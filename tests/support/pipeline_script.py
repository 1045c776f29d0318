"""A whole pipeline for spark-submit: ``pipeline_script.py STORE EPOCHS WORKERS`` fits, scores and prints what it found."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import spark_elastic
from spark_elastic.estimator import TorchClassifier
from spark_elastic.testing import inject, kill, kill_executor


class Net(torch.nn.Module):
    """Defined in the script: executors know it by value only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(self.body.weight)  # some random weights would take more epochs
        torch.nn.init.zeros_(self.body.bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(features)


class Home:
    """Notes where the workers have the package from, and the number of their world."""

    def on_epoch_end(self, ctx: Any) -> None:
        ctx.metrics["home"] = spark_elastic.__file__
        ctx.metrics["generation"] = spark_elastic.generation()


def main(store: str, epochs: str, workers: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    frame = spark.range(400, numPartitions=1).select(f.rand(1).alias("a"), f.rand(2).alias("b"))
    frame = frame.withColumn("label", (f.col("a") > f.col("b")).cast("double"))
    network = TorchClassifier(
        model=Net(), learningRate=0.1, globalBatchSize=20, epochs=int(epochs), store=store, runId="submitted",
        callbacks=Home(), minNp=int(workers), maxNp=int(workers), verbose=0,
    )  # fmt: skip
    # Of those that wait for two, both in the first epoch.
    faults = [kill(rank=1, step=5), kill_executor(rank=1, step=15)] if int(workers) == 2 else []
    with inject(*faults):
        fitted = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), network]).fit(frame)
    history = fitted.stages[-1].history
    found = {
        "right": fitted.transform(frame).where("label = prediction").count(),
        "rows": [entry["rows"] for entry in history],
        "generations": [entry["generation"] for entry in history],
        "driver": spark_elastic.__file__,
        "workers": [entry["home"] for entry in history],
    }
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
