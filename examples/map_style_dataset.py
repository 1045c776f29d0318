"""A map-style dataset, as torch has them, through ElasticDataLoader: every item counts once an epoch in any world.

Two half-moons are told apart. The dataset makes its items itself; one that reads files has to find them on every executor.

    spark-submit --master … examples/map_style_dataset.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn

import spark_elastic as se


class Moons(torch.utils.data.Dataset):
    """``count`` points on two interlocking half circles, and which of the two each is on."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The same item whoever asks for it, and whenever.
        generator = torch.Generator().manual_seed(index)
        upper = index % 2
        angle = torch.rand((), generator=generator) * torch.pi
        point = torch.stack([angle.cos(), angle.sin()])
        point = point if upper else torch.tensor([1.0, 0.5]) - point
        return point + 0.1 * torch.randn(2, generator=generator), torch.tensor(float(upper))


def train_fn(items: int, epochs: int, loader_processes: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = se.DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # Keyword arguments are those of torch's DataLoader: num_workers, collate_fn, pin_memory, …
    loader = se.data.ElasticDataLoader(Moons(items), global_batch_size=64, seed=0, num_workers=loader_processes)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, items=0, right=0.0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while loader.epoch < epochs:
            for points, labels in loader:  # goes on where the last commit left off
                logits = model(points).squeeze(1)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.items += sum(loader.batch_rows)  # of all ranks
                state.right = se.allreduce(((logits > 0) == labels.bool()).float().mean()).item()
                state.report(loss=loss, right=state.right)
                state.commit()
            loader.set_epoch(loader.epoch + 1)
            state.commit()

    train(state)
    return {"items": state.items, "right": state.right}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--loader-processes", type=int, default=0, help="DataLoader processes of each worker")
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    SparkSession.builder.appName("map-style dataset").getOrCreate()
    arguments = (options.items, options.epochs, options.loader_processes)
    results = se.run(train_fn, args=arguments, min_np=1, num_proc=options.workers, max_np=options.workers)
    print(f"{results[0]['items']:,} items trained, {results[0]['right']:.0%} of the last batch right")
    return results


if __name__ == "__main__":
    main()
