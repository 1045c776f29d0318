"""Train on as many executors as the cluster has to give at the moment, from none on.

    spark-submit --master spark://… --conf spark.dynamicAllocation.maxExecutors=8 examples/dynamic_allocation.py

Slots that wait make Spark ask for executors; training begins with the first of them, takes in the others as they come, goes
on without those that go, and Spark releases all when the job has ended.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from pyspark.sql import SparkSession

import spark_elastic as se

ALLOCATION = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",  # works without an external shuffle service
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
}


def train_fn(steps: int, until: str | None) -> int:
    import torch

    model = se.DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)

    def done() -> bool:
        if until is None:
            return bool(state.step >= steps)
        return bool(se.allreduce(torch.tensor(float(os.path.exists(until))), op="max"))

    @se.elastic
    def train(state: Any) -> None:
        while not done():
            x = torch.randn(64, 20)
            optimizer.zero_grad()
            (state.model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)  # stands for a larger model
            state.step += 1
            state.commit()

    train(state)
    return int(state.step)


def show(event: dict[str, Any]) -> None:
    if event["event"] == "world_formed":
        print(f"generation {event['generation']}: {event['size']} workers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--until", help="train until this file exists, whatever --steps")
    arguments = parser.parse_args()
    spark = SparkSession.builder.appName("dynamic allocation").config(map=ALLOCATION).getOrCreate()
    # max_np comes from spark.dynamicAllocation.maxExecutors; with minExecutors=0 one worker is enough to begin.
    steps = se.run(train_fn, args=(arguments.steps, arguments.until), spark=spark, on_event=show)
    print(f"{steps[0]} steps, {len(steps)} workers at the end", flush=True)
    while spark.sparkContext._jsc.sc().getExecutorIds().size():
        time.sleep(0.5)
    print("all executors are released", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
