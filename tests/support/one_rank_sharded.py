"""A ShardedState of one rank: what its user makes, a step, and how the next generation begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from worker_stage import Stage

from spark_elastic import ShardedState
from spark_elastic.protocol.messages import CommitId, Slices


def build() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def shard(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=mesh)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def made(**other: Any) -> ShardedState:
    return ShardedState(**{"build": build, "shard": shard, "optimizer": sgd, **other})


def train(state: ShardedState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 3)).sum().backward()
    state.optimizer.step()
    if state.scheduler is not None:
        state.scheduler.step()
    state.steps = getattr(state, "steps", 0) + 1


def values(state: ShardedState) -> list[torch.Tensor]:
    rows = state._sharded_keeper.model
    assert rows is not None
    return [tensor.clone() for tensor in rows.divided().values()]


def slices(state: ShardedState) -> list[CommitId]:
    found = state._keeper.slices
    assert found is not None
    return [each.commit for each in found]


def held_again(stage: Stage, state: ShardedState) -> None:
    """Go back, and begin the next generation, in which this rank holds the newest commit that it can."""
    state.restore()
    newest: Slices = stage.control.slices[0]
    stage.control.commit = newest.commit
    stage.begin(state, slices=newest)
