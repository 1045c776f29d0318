"""Metrics over all workers after each epoch, and the best model kept.

Spark writes a table; each worker evaluates its part of the validation rows, sums are added up over the workers, and the
weights of the best epoch are part of the state, so that they survive as the present ones do.

    spark-submit --master … examples/evaluation.py --data hdfs:///tmp/evaluation
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from torch import nn

import spark_elastic as se


def write_rows(spark: SparkSession, folder: str, rows: int) -> None:
    """Write ``rows`` rows of a noisy product of two numbers; every fifth is for validation."""
    table = spark.range(rows).select("id", f.rand(1).alias("a"), f.rand(2).alias("b"), f.randn(3).alias("noise"))
    table = table.withColumn("y", f.col("a") * f.col("b") + 0.05 * f.col("noise"))
    table.where("id % 5 > 0").repartition(4).write.mode("overwrite").parquet(f"{folder}/train")
    table.where("id % 5 = 0").repartition(1).write.mode("overwrite").parquet(f"{folder}/validation")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))


def inputs_and_label(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([batch["a"], batch["b"]], 1).float(), batch["y"].float()


@torch.no_grad()
def evaluate(model: se.DistributedDataParallel, url: str) -> dict[str, float]:
    """Return metrics over all validation rows, equal on all ranks. A collective: every rank calls it."""
    # A shard is this rank's part of the rows, none of them twice; it may be empty. Of a metric only sums can be added up.
    rows = se.data.ParquetLoader(url, batch_size=512, shuffle=False, shard=(se.rank(), se.size()))
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for batch in rows:
        x, y = inputs_and_label(batch)
        error = (model.module(x).squeeze(1) - y).double()  # the module itself: nothing is to be reduced
        sums += torch.stack([error.square().sum(), error.abs().sum(), torch.tensor(float(len(y)))])
    model.train()
    squared, absolute, count = se.allreduce(sums, "sum").tolist()
    return {"mse": squared / count, "mae": absolute / count, "rows": count}


def train_fn(folder: str, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = se.DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = se.data.ParquetLoader(f"{folder}/train", global_batch_size=64, seed=0)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, history=[], best=None)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while loader.epoch < epochs:
            for batch in loader:
                x, y = inputs_and_label(batch)
                loss = (model(x).squeeze(1) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.commit()
            metrics = evaluate(model, f"{folder}/validation")
            if all(metrics["mse"] < before["mse"] for before in state.history):
                state.best = {name: value.clone() for name, value in model.module.state_dict().items()}
            state.history.append(metrics)
            state.report(epoch=loader.epoch, **metrics)
            loader.set_epoch(loader.epoch + 1)
            state.commit()  # metrics, best weights and the new epoch, all at once

    train(state)
    # What ranks return travels to the driver; one copy of the weights is enough.
    return {"history": state.history, "best": state.best if se.rank() == 0 else None}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder that all machines share; default: a temporary one of this machine")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    spark = SparkSession.builder.appName("evaluation").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or f"file://{temporary}"
        write_rows(spark, folder, options.rows)
        result = se.run(
            train_fn,
            args=(folder, options.epochs),
            spark=spark,
            min_np=1,
            num_proc=options.workers,
            max_np=options.workers,
        )[0]
    for epoch, metrics in enumerate(result["history"]):
        print(f"epoch {epoch}: mse {metrics['mse']:.5f}, mae {metrics['mae']:.4f} over {metrics['rows']:,.0f} rows")
    return result


if __name__ == "__main__":
    main()
