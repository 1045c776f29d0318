"""One worker for each GPU of a cluster. The same script runs on CPUs where Spark has no GPUs to give.

Spark assigns GPUs to tasks, so tell it which there are, and that each task takes one:

    spark-submit --master … \\
        --conf spark.executor.resource.gpu.amount=2 \\
        --conf spark.executor.resource.gpu.discoveryScript=/opt/spark/examples/src/main/scripts/getGpusResources.sh \\
        --conf spark.task.resource.gpu.amount=1 \\
        --conf spark.executor.cores=8 --conf spark.task.cpus=4 \\
        examples/gpu_cluster.py --data s3a://bucket/rows

A worker sees its GPU only (CUDA_VISIBLE_DEVICES is set from what Spark has assigned), and ``se.device()`` is that one. Workers
talk over NCCL where each has a GPU, else over Gloo. ``spark.task.cpus`` is the threads that a worker has, for reading and
decoding.
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


def write_rows(spark: SparkSession, url: str, rows: int) -> None:
    """Write vectors of 64 floats and the sum of each; row groups of a few MB keep all workers busy."""
    numbers = f.array(*(f.rand(seed).cast("float") for seed in range(64)))
    table = spark.range(rows).select(numbers.alias("x"))
    table = table.withColumn("y", f.aggregate("x", f.lit(0.0).cast("float"), lambda total, value: total + value))
    table.repartition(8).write.mode("overwrite").option("parquet.block.size", 4 << 20).parquet(url)


def train_fn(url: str, epochs: int, commit: str) -> dict[str, Any]:
    torch.manual_seed(0)
    device = se.device()
    net = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    # Keyword arguments go to torch's wrapper: buckets that fit the network, gradients without a second copy.
    model = se.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=device.type == "cuda")
    # Batches are gathered in pinned memory where there is CUDA, so that they are copied while the GPU computes.
    loader = se.data.ParquetLoader(url, global_batch_size=256, seed=0)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, commit=commit, loss=0.0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while loader.epoch < epochs:
            for batch in loader:
                x = batch["x"].to(device, non_blocking=True)
                y = batch["y"].to(device, non_blocking=True)
                with torch.autocast(device.type, torch.bfloat16):
                    output = model(x).squeeze(1)
                loss = (output.float() - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.report(loss=loss)  # becomes a number a few times a second only: no wait for the GPU in each step
                state.commit()
            state.loss = se.allreduce(loss).item()
            loader.set_epoch(loader.epoch + 1)
            state.commit()

    train(state)
    return {
        "loss": state.loss,
        "device": str(device),
        "weights": [weight.sum().item() for weight in model.parameters()],
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="URL that all machines reach; default: a temporary folder of this one")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--commit", choices=("copy", "host"), default="copy", help="host: copies in the CPU's memory")
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    spark = SparkSession.builder.appName("GPU cluster").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        url = options.data or f"file://{temporary}/rows"
        write_rows(spark, url, options.rows)
        arguments = (url, options.epochs, options.commit)
        results = se.run(
            train_fn, args=arguments, spark=spark, min_np=1, num_proc=options.workers, max_np=options.workers
        )
    print(f"loss {results[0]['loss']:.4f} on {', '.join(result['device'] for result in results)}")
    return results


if __name__ == "__main__":
    main()
