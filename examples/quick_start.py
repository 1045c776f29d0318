"""The shortest job: a line is fitted on all workers that Spark has, and goes on when some of them die or others come.

spark-submit --master … examples/quick_start.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from pyspark.sql import SparkSession

import spark_elastic as se


def train_fn(steps: int) -> float:
    model = se.DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    state = se.TorchState(model=model, optimizer=optimizer, step=0, loss=0.0)

    @se.elastic  # entered again after each change of the world: it goes on from what the state says
    def train(state: se.TorchState) -> None:
        while state.step < steps:
            x = torch.randn(256, 20)  # each worker has rows of its own
            loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()  # leaves the mean gradient of all workers
            optimizer.step()
            state.step += 1
            state.loss = se.allreduce(loss).item()
            state.commit()  # from here on no loss of a worker takes this step back

    train(state)
    return state.loss


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    SparkSession.builder.appName("quick start").getOrCreate()
    losses = se.run(train_fn, args=(options.steps,), min_np=1, num_proc=options.workers, max_np=options.workers)
    print(f"{len(losses)} workers at the end, with losses of {', '.join(f'{loss:.4f}' for loss in losses)}")
    return losses


if __name__ == "__main__":
    main()
