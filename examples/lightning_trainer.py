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
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import spark_elastic as se

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


# ---------------------------------------------------------------- what makes it elastic


class Processes(LightningEnvironment):
    """Each worker is a node of Lightning's with one process, which is there already."""

    creates_processes_externally = True

    def node_rank(self) -> int:
        return se.rank()

    def local_rank(self) -> int:
        return 0


class Elastic(DDPStrategy):
    """Lightning's strategy in the process group that is there, with the wrapper that outlives it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(cluster_environment=Processes())
        self.wrapped = model

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return self.wrapped


class Commit(pl.Callback):
    """Commits after each batch, and after each epoch, how far the Trainer is, and has a new Trainer go on from there."""

    def __init__(self, state: se.TorchState) -> None:
        self.state = state

    def on_fit_start(self, trainer: pl.Trainer, lit: pl.LightningModule) -> None:
        if self.state.progress is not None:
            trainer.fit_loop.load_state_dict(self.state.progress)

    def on_train_epoch_start(self, trainer: pl.Trainer, lit: pl.LightningModule) -> None:
        self.state.loader.set_epoch(trainer.current_epoch)
        trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()  # as Lightning does after this hook
        self.commit(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.state.items += sum(self.state.loader.batch_rows)
        self.state.right = se.allreduce(trainer.callback_metrics["right"]).item()
        if not trainer.is_last_batch:  # that one is committed when Lightning has ended the epoch
            self.commit(trainer)

    def on_train_end(self, trainer: pl.Trainer, lit: pl.LightningModule) -> None:
        self.commit(trainer)

    def commit(self, trainer: pl.Trainer) -> None:
        self.state.progress = trainer.fit_loop.state_dict()
        self.state.commit()


def train_fn(items: int, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    lit = LitNet()
    configured = optimizers, schedulers = lit.configure_optimizers()
    lit.configure_optimizers = lambda: configured  # every Trainer goes on with these
    model = se.DistributedDataParallel(lit)
    loader = se.data.ElasticDataLoader(Digits(items), global_batch_size=64)
    state = se.TorchState(
        model=model, optimizers=optimizers, schedulers=schedulers, loader=loader, progress=None, items=0, right=0.0
    )

    @se.elastic  # entered again after each change of the world
    def train(state: se.TorchState) -> None:
        trainer = pl.Trainer(
            max_epochs=epochs,
            strategy=Elastic(model),
            devices=1,
            num_nodes=se.size(),
            callbacks=[Commit(state)],
            use_distributed_sampler=False,  # the loader shares the rows out
            enable_checkpointing=False,  # run(checkpoint=) does it
            enable_progress_bar=False,
            logger=False,
        )
        trainer.fit(lit, loader)

    train(state)
    weights = torch.cat([parameter.detach().flatten() for parameter in lit.parameters()])
    return {
        "items": state.items,
        "right": state.right,
        "rate": optimizers[0].param_groups[0]["lr"],
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
