"""Losses that a part of a model keeps beside its outputs are warned of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from spark_elastic.worker.checks.kept_losses import warn_of_kept_losses


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(2, 2), None
        self.count = torch.zeros(())

    def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
        x = self.layer(x)
        self.kept = how(x)
        return x


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        (lambda x: x.square().mean(), True),
        (lambda x: [x.square().mean()], True),
        (lambda x: x.square().mean().detach(), False),
        (lambda x: x, False),
    ],
    ids=["a loss", "a list of losses", "detached", "features"],
)
def test_a_loss_that_a_part_keeps_is_warned_of_once(how: Any, is_told: bool) -> None:
    model = nn.Sequential(keeper := Keeper())
    keeper(torch.ones(1, 2), how)
    for expected in (is_told, False):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_of_kept_losses(model)
        assert ["Keeper.kept is kept beside the outputs" in str(each.message) for each in told] == [True] * expected
