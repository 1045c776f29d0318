"""A whole pipeline for spark-submit: ``pipeline_script.py STORE EPOCHS`` fits, saves, loads, scores and prints what it found."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import spark_elastic
from spark_elastic.estimator import TorchClassifier


class Net(torch.nn.Module):
    """Defined in the script: executors know it by value only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(features)


class Home:
    """Notes where the workers have the package from."""

    def on_epoch_end(self, ctx: Any) -> None:
        ctx.metrics["home"] = spark_elastic.__file__


def main(store: str, epochs: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    columns = [f.rand(1).alias("a"), f.rand(2).alias("b")]
    frame = spark.range(400, numPartitions=2).select(*columns)
    frame = frame.withColumn("kind", f.when(f.col("a") > f.col("b"), "over").otherwise("under"))
    network = TorchClassifier(
        model=Net(), learningRate=0.1, labelCol="label", globalBatchSize=50, epochs=int(epochs), store=store, runId="submitted",
        callbacks=Home(), minNp=2, maxNp=2, verbose=0,
    )  # fmt: skip
    stages = [
        StringIndexer(inputCol="kind", outputCol="label", stringOrderType="alphabetAsc"),
        VectorAssembler(inputCols=["a", "b"], outputCol="features"),
        network,
    ]
    fitted = Pipeline(stages=stages).fit(frame)
    fitted.write().overwrite().save(f"{store}/model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading runs code
        scored = PipelineModel.load(f"{store}/model").transform(frame)
    history = fitted.stages[-1].history
    found = {
        "auc": BinaryClassificationEvaluator().evaluate(scored),
        "rows": [entry["rows"] for entry in history],
        "homes": [spark_elastic.__file__, history[-1]["home"]],
    }
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
