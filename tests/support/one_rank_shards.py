"""Training on the shards of batches in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import spark_elastic as se


class Rows(torch.utils.data.Dataset[Any]):
    """Rows with random numbers of their own."""

    def __init__(self, count: int, generator: np.random.Generator | None = None) -> None:
        self.count, self.generator = count, generator

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = np.random.rand() if self.generator is None else self.generator.random()
        return torch.full((4,), float(index)) + torch.rand(4), torch.tensor(number)


def training(
    net: nn.Module | None = None, rows: int = 40, begin: bool = True, shards: int | None = 4, **loader: Any
) -> se.TorchState:
    torch.manual_seed(0)
    model = se.DistributedDataParallel(net or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = {"global_batch_size": 20, "shards": shards, **loader}
    state = se.TorchState(
        model=model, optimizer=optimizer, loader=se.data.ElasticDataLoader(Rows(rows), seed=1, **loader)
    )
    if begin:
        state._begin(None)
    return state


def first(state: se.TorchState) -> Any:
    return next(iter(state.loader))


def run(state: se.TorchState, batch: Any) -> Any:
    parts = state.model.parts(batch)
    for x, _ in parts:
        loss = state.model(x).square().mean()
        loss.backward()
        parts.note(loss=loss)
    return parts
