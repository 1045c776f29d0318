"""A raw loop of Lightning Fabric, elastic: what is ours is marked by ``+``; all else is as in Fabric's
documentation.

    python examples/fabric.py --local          # on this machine, without Spark
    spark-submit --master … examples/fabric.py

One worker is one process with one device of its own, so Fabric is given one device, and averages nothing by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

import spark_elastic as se  # +


class Digits(torch.utils.data.Dataset):
    """Pictures of 8 x 8 in ten classes: a pattern for each, and noise."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return self.patterns[index % 10] + noise, index % 10


def train_fn(items: int, epochs: int, precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="auto", devices=1, precision=precision)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(fabric.device)
    wrapped = se.DistributedDataParallel(net)  # + averages gradients over all ranks, in every generation
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(wrapped, sgd)
    loader = se.data.ElasticDataLoader(Digits(items), global_batch_size=64)  # instead of DataLoader, setup_dataloaders
    state = se.TorchState(model=wrapped, optimizer=sgd, loader=loader, epoch=0, items=0, right=0.0)  # +

    @se.elastic  # + entered again after each change of the world
    def train(state: se.TorchState) -> None:
        while state.epoch < epochs:
            for batch in loader:
                pictures, labels = fabric.to_device(batch)
                optimizer.zero_grad()
                logits = model(pictures)
                loss = nn.functional.cross_entropy(logits, labels)
                fabric.backward(loss)
                optimizer.step()
                state.items += sum(loader.batch_rows)
                state.right = se.allreduce((logits.argmax(1) == labels).float().mean()).item()
                state.commit()  # +
            state.epoch += 1
            loader.set_epoch(state.epoch)  # +
            state.commit()  # +

    train(state)  # +
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return {"items": state.items, "right": state.right, "weights": weights.double().abs().sum().item()}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that there are")
    parser.add_argument("--local", action="store_true", help="train in processes of this machine")
    parser.add_argument("--event-log", help="a file that `spark-elastic summary` tells the cost of resets from")
    options = parser.parse_args(argv)
    arguments = (options.items, options.epochs, options.precision)
    workers = options.workers
    settings = {"min_np": 1, "num_proc": workers, "max_np": workers, "local": options.local}
    results = se.run(train_fn, args=arguments, event_log=options.event_log, **settings)
    print(f"{results[0]['items']:,} items trained, {results[0]['right']:.0%} of the last batch right")
    return results


if __name__ == "__main__":
    main()
