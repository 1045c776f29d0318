"""DiLoCo: rounds of many local steps by AdamW, then one step of an outer optimizer with what all workers have learnt.

Of local SGD it differs in the outer optimizer: the way that the workers' mean has gone in a round is its gradient, and its
momentum carries over rounds, so that these may be much longer (Douillard et al., 2023, https://arxiv.org/abs/2311.08105).

    spark-submit --master … examples/diloco.py
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

CONTEXT = 8


def windows(count: int) -> torch.utils.data.TensorDataset:
    """Return windows of a sequence in which each number follows from the two before, and the number after each window."""
    numbers = [1, 1]
    while len(numbers) < count + CONTEXT:
        numbers.append((numbers[-1] + numbers[-2]) % 29)
    sequence = torch.tensor(numbers)
    return torch.utils.data.TensorDataset(sequence.unfold(0, CONTEXT, 1)[:count], sequence[CONTEXT : CONTEXT + count])


def train_fn(count: int, epochs: int, every: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(29, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.ReLU(), nn.Linear(64, 29))
    model = se.DistributedDataParallel(net)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    loader = se.data.ElasticDataLoader(windows(count), global_batch_size=64, seed=0)
    # The outer optimizer is the same on all ranks, as the weights are at commits. The inner one is each rank's own.
    state = se.TorchState(model=model, optimizer=outer, loader=loader, local={"inner": inner}, rows=0, rounds=0)

    def end_round(state: se.TorchState, start: torch.Tensor) -> torch.Tensor:
        """Make the outer step from the weights with which the round began; return those of the next one."""
        gradient = start - se.allreduce(parameters_to_vector(model.parameters()))
        with torch.no_grad():
            vector_to_parameters(start, model.parameters())
        offset = 0
        for parameter in model.parameters():
            parameter.grad = gradient[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        outer.step()
        outer.zero_grad()
        state.rounds += 1
        state.commit()
        return weights()

    def weights() -> torch.Tensor:
        return parameters_to_vector(model.parameters()).detach().clone()

    @se.elastic
    def train(state: se.TorchState) -> None:
        start = weights()  # a round begins with the weights of a commit, after a reset, too
        while loader.epoch < epochs:
            for number, (x, y) in enumerate(loader, 1):
                inner.zero_grad()
                with model.no_sync():
                    nn.functional.cross_entropy(model(x), y).backward()
                inner.step()
                state.rows += sum(loader.batch_rows)
                if number % every == 0:
                    start = end_round(state, start)
            loader.set_epoch(loader.epoch + 1)
            start = end_round(state, start)

    train(state)
    x, y = windows(count).tensors
    with torch.no_grad():
        right = (model.module(x).argmax(1) == y).float().mean().item()
    return {
        "right": right,
        "rows": state.rows,
        "rounds": state.rounds,
        "weights": hashlib.sha256(weights().numpy().tobytes()).hexdigest(),
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=32, help="steps of a round")
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    results = se.run(
        train_fn,
        args=(options.windows, options.epochs, options.every),
        min_np=1,
        num_proc=options.workers,
        max_np=options.workers,
    )
    print(f"{results[0]['right']:.1%} right after {results[0]['rounds']} rounds and {results[0]['rows']:,} rows")
    return results


if __name__ == "__main__":
    main()
