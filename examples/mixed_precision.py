"""bfloat16 where it is safe, batches larger than memory, and a learning rate with a course.

The global batch is the same in every world: when workers go, each has a larger share, cut into parts that still fit. The
scheduler steps once for each global batch, so its course is the same in every world, too.

    spark-submit --master … examples/mixed_precision.py
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn

import spark_elastic as se

GLOBAL_BATCH = 256
ROWS_IN_MEMORY = 48  # of one worker at a time; what fits is found by trying


class Rows(torch.utils.data.Dataset):
    """Rows whose label is the sum of their numbers; each is made from its index."""

    def __len__(self) -> int:
        return 16 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return x, x.sum()


def train_fn(epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    device = se.device()
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1))
    model = se.DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = se.data.ElasticDataLoader(Rows(), global_batch_size=GLOBAL_BATCH, seed=0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=epochs * len(loader))
    # For float16 add scaler=torch.amp.GradScaler(): whatever has a state dict is kept like these.
    state = se.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, rates=[], loss=0.0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while loader.epoch < epochs:
            for batch in loader:
                optimizer.zero_grad()
                total = torch.zeros((), device=device)
                for (x, y), share in se.micro_batches(model, batch, ROWS_IN_MEMORY):
                    with torch.autocast(device.type, torch.bfloat16):
                        output = model(x.to(device)).squeeze(1)
                    loss = (output.float() - y.to(device)).square().mean()  # losses in float32
                    (share * loss).backward()  # ranks talk in the last part's only
                    total += share * loss.detach()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                state.rates.append(scheduler.get_last_lr()[0])
                state.loss = se.allreduce(total).item()
                state.report(loss=state.loss)
                state.commit()
            loader.set_epoch(loader.epoch + 1)
            state.commit()

    train(state)
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    return {"loss": state.loss, "rates": state.rates, "weights": hashlib.sha256(weights).hexdigest()}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    SparkSession.builder.appName("mixed precision").getOrCreate()
    results = se.run(train_fn, args=(options.epochs,), min_np=1, num_proc=options.workers, max_np=options.workers)
    print(f"{len(results[0]['rates'])} steps of {GLOBAL_BATCH} rows, loss {results[0]['loss']:.4f}")
    return results


if __name__ == "__main__":
    main()
