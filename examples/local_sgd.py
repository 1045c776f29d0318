"""Local SGD: workers train alone for some steps, then average their weights. For slow networks.

With ``--every 16`` a sixteenth of the bytes of data-parallel training go over the network, in one piece.

    spark-submit --master … examples/local_sgd.py
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import spark_elastic as se


def rows(count: int) -> torch.utils.data.TensorDataset:
    """Return points of a plane, and whether they lie within a circle."""
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.utils.data.TensorDataset(points, (points.square().sum(1) < 0.6).float())


def train_fn(count: int, epochs: int, every: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = se.DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = se.data.ElasticDataLoader(rows(count), global_batch_size=128, seed=0)
    # The momentum is each rank's own. Only at commits are the weights equal on all ranks, so newcomers get those.
    state = se.TorchState(model=model, loader=loader, local={"optimizer": optimizer}, rows=0, rounds=0)

    def average(state: se.TorchState) -> None:
        mean = se.allreduce(parameters_to_vector(model.parameters()))
        with torch.no_grad():
            vector_to_parameters(mean, model.parameters())
        state.rounds += 1
        state.commit()

    @se.elastic
    def train(state: se.TorchState) -> None:
        while loader.epoch < epochs:
            for number, (x, y) in enumerate(loader, 1):
                optimizer.zero_grad()
                with model.no_sync():
                    loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
                    loss.backward()
                optimizer.step()
                state.rows += sum(loader.batch_rows)
                if number % every == 0:
                    average(state)
            loader.set_epoch(loader.epoch + 1)
            average(state)

    train(state)
    x, y = rows(count).tensors
    with torch.no_grad():
        right = ((model.module(x).squeeze(1) > 0) == (y > 0)).float().mean().item()
    weights = parameters_to_vector(model.parameters()).detach().numpy()
    return {
        "right": right,
        "rows": state.rows,
        "rounds": state.rounds,
        "weights": hashlib.sha256(weights.tobytes()).hexdigest(),
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every", type=int, default=16, help="steps between two averages")
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    results = se.run(
        train_fn,
        args=(options.rows, options.epochs, options.every),
        min_np=1,
        num_proc=options.workers,
        max_np=options.workers,
    )
    print(f"{results[0]['right']:.1%} right after {results[0]['rounds']} averages and {results[0]['rows']:,} rows")
    return results


if __name__ == "__main__":
    main()
