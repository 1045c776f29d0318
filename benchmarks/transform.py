"""Rows per second of ``TorchModel.transform``, of a bare ``predict_batch_udf`` with the same network, and of a loop over rows.

All three score the same cached DataFrame with a 20-128-64-1 network on two executors and sum the scores. The first two take
turns; the medians of the rounds are compared. The loop over rows (``rdd.mapPartitions``, one call of the network a row) gets a
part of the rows.

    python benchmarks/transform.py [--rows 2000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import cloudpickle
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import DoubleType
from torch import nn

from spark_elastic.estimator import TorchModel
from spark_elastic.estimator.layout import Input, Layout

FEATURES = 20
BATCH = 4096


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)).eval()


def bare_udf(spark: Any) -> Any:
    """What one would write by hand."""
    network = spark.sparkContext.broadcast(cloudpickle.dumps(make_network()))

    def make() -> Any:
        import numpy
        import torch

        loaded = cloudpickle.loads(network.value)

        def predict(features: numpy.ndarray) -> numpy.ndarray:
            with torch.inference_mode():
                return loaded(torch.from_numpy(features)).squeeze(1).double().numpy()

        return predict

    return predict_batch_udf(make, return_type=DoubleType(), batch_size=BATCH, input_tensor_shapes=[[FEATURES]])


def by_rows(rows: Any) -> Any:
    """The network once a row."""
    network = make_network()
    for row in rows:
        with torch.inference_mode():
            yield float(network(torch.tensor(row["features"])))


def timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    features = f.array(*(f.rand(seed).cast("float") for seed in range(FEATURES))).alias("features")
    frame = spark.range(options.rows, numPartitions=4).select("id", features).persist()
    frame.count()

    model = TorchModel(make_network(), outputCols=["score"], transformBatchSize=BATCH).describe(
        layout=Layout((Input(None, ("features",)),)), shapes={"features": (FEATURES,)}, widths=[0]
    )
    udf = bare_udf(spark)
    ways = {
        "bare predict_batch_udf": lambda: frame.withColumn("score", udf("features")),
        "TorchModel.transform": lambda: model.transform(frame),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, way in ways.items():
            spent = timed(lambda way=way: way().agg(f.sum("score")).collect())
            if turn:  # the first round starts Python workers
                seconds[name].append(spent)
    rates = {name: options.rows / statistics.median(spent) for name, spent in seconds.items()}
    part = max(options.rows // 40, 1)
    rates["rdd.mapPartitions by row"] = part / timed(lambda: frame.limit(part).rdd.mapPartitions(by_rows).sum())
    spark.stop()

    bare, ours = rates["bare predict_batch_udf"], rates["TorchModel.transform"]
    for name, rate in rates.items():
        print(f"{name:26s} {rate:12,.0f} rows/s   {rate / bare:5.2f} of bare")
    return 0 if ours >= 0.9 * bare and ours >= 3 * rates["rdd.mapPartitions by row"] else 1


if __name__ == "__main__":
    sys.exit(main())
