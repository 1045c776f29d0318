"""A job without SQL: ``spark-submit … job.py FOLDER MIN MAX`` trains until ``FOLDER/stop`` exists.

It leaves ``result.json``, ``events.jsonl`` and checkpoints in FOLDER. Each worker tells in ``FOLDER/workers/<its pid>`` which
world it trains in, see ``reports.py``. A worker for which there is ``FOLDER/eat-<its pid>`` takes much memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import spark_elastic as se

RELEASE_SECONDS = 90.0


def train_fn(folder: str) -> dict[str, Any]:
    import torch

    class Counter(torch.nn.Module):
        """A number that goes up by one with each step that counts."""

        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.Parameter(torch.zeros(1))

        def forward(self) -> torch.Tensor:
            return -self.steps.sum()

    model = se.DistributedDataParallel(Counter())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)

    def report() -> None:
        own = f"{folder}/workers/{os.getpid()}"
        with open(f"{own}.new", "w") as file:
            file.write(f"{se.generation()} {se.rank()} {se.size()}")
        os.replace(f"{own}.new", own)

    eaten: list[torch.Tensor] = []

    def eat() -> None:
        if not eaten and os.path.exists(f"{folder}/eat-{os.getpid()}"):
            eaten.append(torch.ones(2 << 30, dtype=torch.uint8))

    @se.elastic
    def train(state: Any) -> None:
        while not se.allreduce(torch.tensor(float(os.path.exists(f"{folder}/stop"))), op="max"):
            optimizer.zero_grad()
            state.model().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            report()
            eat()
            time.sleep(0.05)

    train(state)
    return {"steps": state.step, "counted": model.module.steps.item(), "pid": os.getpid(), "python": sys.prefix}


def main(folder: str, least: str, most: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    (Path(folder) / "workers").mkdir(exist_ok=True)
    results = se.run(
        train_fn, args=(folder,), spark=spark, min_np=int(least), max_np=int(most), elastic_timeout=300.0,
        checkpoint=f"{folder}/checkpoint", checkpoint_interval=0.5, event_log=f"{folder}/events.jsonl",
    )  # fmt: skip
    began = time.monotonic()
    while spark.sparkContext._jsc.sc().getExecutorIds().size():
        assert time.monotonic() < began + RELEASE_SECONDS, "Spark keeps executors that have nothing to do"
        time.sleep(0.1)
    released = time.monotonic() - began
    Path(folder, "result.json").write_text(json.dumps({"workers": results, "release": released}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
