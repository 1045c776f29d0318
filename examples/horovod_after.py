"""horovod_before.py on spark_elastic. What has changed is said where it has.

spark-submit --master … examples/horovod_after.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from pyspark.sql import SparkSession
from torch import nn

import spark_elastic as se


def points() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 10, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1))


def train_fn(epochs: int) -> float:
    # No init(), and no rank or size up here: a newcomer runs this part while the others train, before it belongs to a world.
    device = se.device()
    # Sampler and DataLoader are one, which remembers by itself what has been trained on.
    loader = se.data.ElasticDataLoader(points(), batch_size=32, shuffle=True, seed=0)

    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    # The model is wrapped, not the optimizer; gradients are averaged while backward runs.
    model = se.DistributedDataParallel(model)
    # The rate of the world that begins, main's num_proc=2; the reset callback scales it from there.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002 * 2, momentum=0.9)

    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0, loss=0.0)
    state.register_reset_callbacks([se.scale_learning_rate(optimizer)])

    @se.elastic
    def train(state: se.TorchState) -> float:
        while state.epoch < epochs:
            for x, y in state.loader:  # no batch to start from, no record_batch
                optimizer.zero_grad()
                loss = (state.model(x.to(device)).squeeze(1) - y.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                # In the state: a loss of a worker may have us enter again with nothing left to do.
                state.loss = se.allreduce(loss).item()
                state.commit()  # costs little: after each batch, so that no more than one is done again
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            state.commit()
        return state.loss

    return train(state)


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(argv)
    SparkSession.builder.appName("after").getOrCreate()
    # min_num_proc and max_num_proc are min_np and max_np.
    losses = se.run(train_fn, args=(options.epochs,), num_proc=2, min_np=1, max_np=4, start_timeout=600)
    print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    main()
