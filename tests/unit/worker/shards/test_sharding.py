"""What a model may be called for outside a loop over parts, and what cannot train on shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from one_rank_shards import training
from torch import nn

import spark_elastic as se
from spark_elastic.errors import SparkElasticError, TrainingCodeError


def test_validation_needs_no_parts() -> None:
    state = training()
    state.model.eval()
    state.model(torch.ones(2, 4))


class Averaging(nn.Linear):
    """Puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return super().forward(x)


def test_validation_in_training_mode_that_changes_statistics_by_this_ranks_rows_is_refused() -> None:
    state = training()
    with (
        torch.no_grad(),
        pytest.raises(TrainingCodeError, match=r"has changed its buffer 1\.running_mean, by this rank's rows"),
    ):
        state.model(torch.ones(2, 4))
    state = training(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    with torch.no_grad():
        state.model(torch.ones(2, 4))  # there is nothing that it could change
    state = training(Averaging())
    state.model.eval()
    state.model.module.train()
    with torch.no_grad(), pytest.raises(TrainingCodeError, match="has changed its buffer mean, by this rank's rows"):
        state.model(torch.ones(2, 4))


def test_the_whole_batch_in_the_place_of_a_part_is_refused(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"x": pa.array(np.ones((20, 4)).tolist(), pa.list_(pa.float32(), 4))}), tmp_path / "part.parquet"
    )
    loader = se.data.ParquetLoader(tmp_path, global_batch_size=20, shards=4)
    model = se.DistributedDataParallel(nn.Linear(4, 1))
    state = se.TorchState(model=model, loader=loader)
    state._begin(None)
    batch = next(iter(state.loader))
    for part in state.model.parts(batch):
        state.model(part["x"]).sum().backward()
    parts = iter(state.model.parts(batch))
    next(parts)
    with pytest.raises(TrainingCodeError, match="Linear was given a loader's batch inside the loop"):
        state.model(batch["x"])


@pytest.mark.parametrize(
    ("net", "words"), [(nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3)), "SyncBatchNorm"), (None, "hook")]
)
def test_what_depends_on_the_world_is_refused(net: nn.Module | None, words: str) -> None:
    state = training(net, begin=False)
    if net is None:
        state.model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(SparkElasticError, match=f"cannot train with shards=4.*{words}"):
        state._begin(None)
