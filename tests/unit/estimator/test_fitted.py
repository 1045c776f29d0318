"""What of a trained network is the result of a fit: all buffers, and word of other attributes that changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fit_plans import plan
from torch import nn

from spark_elastic.estimator.callbacks import BestModel
from spark_elastic.estimator.fitted import load_weights
from spark_elastic.estimator.training import train


class Counting(nn.Module):
    """Counts in buffers of both kinds, in a tensor and in a number, how often it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.inner = nn.Module()
        self.register_buffer("kept", torch.zeros(()))
        self.inner.register_buffer("also", torch.zeros(()), persistent=False)
        self.inner.register_buffer("alias", self.inner.also, persistent=False)
        self.inner.register_buffer("late", None, persistent=False)
        self.inner.register_buffer("wide", torch.ones(1).expand(3), persistent=False)
        self.lost, self.number, self.same = torch.zeros(()), 0, torch.tensor([1.0, torch.nan])
        self.sparse, self.lists = torch.ones(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.number += 1
            for count in (self.kept, self.inner.also, self.lost):
                count += 1
            self.inner.late = self.inner.also * 2
            self.inner.register_buffer("found", torch.tensor(7.0), persistent=False)
        output: torch.Tensor = self.layer(x)
        return output


@pytest.mark.parametrize("callbacks", [[], [BestModel("val_loss")]])
def test_all_buffers_are_part_of_the_result_and_other_attributes_that_changed_are_named(
    dataset: str, callbacks: Any
) -> None:
    found = train(plan(dataset, model=Counting(), callbacks=callbacks))
    assert found is not None
    assert found.changed == ("lost", "number")
    network = Counting()
    load_weights(network, found.weights, found.buffers)
    assert [network.kept.item(), network.inner.also.item(), network.inner.late.item()] == [20, 20, 40]
    assert network.inner.alias is network.inner.also
    assert network.inner.found.item() == 7
    assert "found" not in network.state_dict()


def test_what_torch_makes_of_parameters_in_each_forward_is_no_attribute_that_changed(dataset: str) -> None:
    found = train(plan(dataset, model=nn.utils.weight_norm(nn.Linear(1, 1))))
    assert found is not None
    assert found.changed == ()
