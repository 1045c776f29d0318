"""A script with Lightning's Trainer, elastic in the same process: after each change of the world a new Trainer goes on where
the last commit left off, with the same model and optimizer.

    python examples/lightning_trainer.py --local          # on this machine, without Spark
    spark-submit --master … examples/lightning_trainer.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

import spark_elastic as se
from spark_elastic.lightning import LightningState

# ---------------------------------------------------------------- as it was


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


class LitNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pictures, labels = batch
        logits = self.net(pictures)
        self.log("right", (logits.argmax(1) == labels).float().mean())
        return nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Numbers(pl.Callback):
    """Notes what the script prints at its end."""

    def __init__(self, state: se.TorchState) -> None:
        self.state = state

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.state.items += sum(self.state.loader.batch_rows)
        self.state.right = se.allreduce(trainer.callback_metrics["right"]).item()


# ---------------------------------------------------------------- what makes it elastic


def train_fn(items: int, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    lit = LitNet()
    loader = se.data.ElasticDataLoader(Digits(items), global_batch_size=64)
    state = LightningState(lit, loader=loader, items=0, right=0.0)
    quiet = {"enable_progress_bar": False, "logger": False}

    @se.elastic  # entered again after each change of the world
    def train(state: LightningState) -> None:
        trainer = state.trainer(max_epochs=epochs, callbacks=Numbers(state), **quiet)
        trainer.fit(lit, loader)

    train(state)
    weights = torch.cat([parameter.detach().flatten() for parameter in lit.parameters()])
    return {
        "items": state.items,
        "right": state.right,
        "rate": state.optimizers[0].param_groups[0]["lr"],
        "weights": weights.double().abs().sum().item(),
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that there are")
    parser.add_argument("--local", action="store_true", help="train in processes of this machine")
    parser.add_argument("--event-log", help="a file that `spark-elastic summary` tells the cost of resets from")
    options = parser.parse_args(argv)
    workers = options.workers
    arguments = (options.items, options.epochs)
    settings = {"min_np": 1, "num_proc": workers, "max_np": workers, "local": options.local}
    results = se.run(train_fn, args=arguments, event_log=options.event_log, **settings)
    print(f"{results[0]['items']:,} items trained, {results[0]['right']:.0%} of the last batch right")
    return results


if __name__ == "__main__":
    main()
