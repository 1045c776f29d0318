"""A function that is tried outside a job is told of a model that a job would refuse."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from spark_elastic import DistributedDataParallel, TorchState, elastic


def train(state: TorchState, *optimizers: torch.optim.Optimizer, model: Any) -> None:
    @elastic
    def steps(state: TorchState) -> None:
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    steps(state)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_module_that_trains_and_is_not_wrapped_is_warned_of_once_at_the_users_line() -> None:
    net = torch.nn.Linear(2, 1)
    optimizers = [sgd(net), sgd(net)]
    with pytest.warns(
        UserWarning, match=r"state\.net\.weight trains .* Write net = se\.DistributedDataParallel\(net\)"
    ) as told:
        train(TorchState(net=net, optimizers=optimizers), *optimizers, model=net)
    assert [warning.filename for warning in told] == [__file__]


def test_wrapped_modules_and_those_of_each_rank_are_not_warned_of_nor_is_what_trains_later() -> None:
    net, mine, other = (torch.nn.Linear(2, 1) for _ in range(3))
    model = DistributedDataParallel(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(TorchState(model=model), sgd(net), model=model)
        train(TorchState(model=net), sgd(net), model=model)  # the State holds the module alone
        train(TorchState(model=model, local={"mine": mine}), sgd(mine), model=mine)
        train(TorchState(model=model, teacher=other), sgd(net), model=model)
        train(TorchState(model=other), model=other)
        sgd(other).step()
