"""A script for Elastic Horovod on Spark, as it was. Compare it with horovod_after.py.

spark-submit --master … examples/horovod_before.py
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.spark
import horovod.torch as hvd
import torch
from pyspark.sql import SparkSession
from torch import nn


def points() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 10, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1))


def train_fn(epochs: int) -> Any:
    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    dataset = points()
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    def on_state_reset() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.002 * hvd.size()

    state.register_reset_callbacks([on_state_reset])

    @hvd.elastic.run
    def train(state: Any) -> float:
        loss = torch.tensor(0.0)
        while state.epoch < epochs:
            for batch, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = (state.model(x.to(device)).squeeze(1) - y.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(batch, 32)
                if batch % 10 == 0:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()
        return hvd.allreduce(loss.detach(), name="loss").item()

    return train(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    SparkSession.builder.appName("before").getOrCreate()
    losses = horovod.spark.run_elastic(
        train_fn, args=(options.epochs,), num_proc=2, min_num_proc=1, max_num_proc=4, start_timeout=600
    )
    print(f"losses {losses}")


if __name__ == "__main__":
    main()
