"""A job of one rank, and a ShardedState that has made one commit in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from one_rank_sharded import made, step_lr, train
from worker_stage import Stage, on_stage

from spark_elastic import ShardedState


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A job of one rank, which is torch's default group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with on_stage() as stage:
        yield stage
    dist.destroy_process_group()


@pytest.fixture
def begun(stage: Stage) -> ShardedState:
    state = made(scheduler=step_lr, steps=0)
    stage.begin(state)
    train(state)
    state.commit()
    return state
