"""A function that is tried outside a job fails on a model that a job would refuse."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from spark_elastic import DistributedDataParallel, TorchState, allreduce, elastic
from spark_elastic.errors import TrainingCodeError


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


def test_a_module_that_trains_and_is_not_wrapped_is_the_error_of_a_job() -> None:
    net = torch.nn.Linear(2, 1)
    before = net.weight.detach().clone()
    with pytest.raises(
        TrainingCodeError, match=r"state\.net\.weight trains .* Write net = se\.DistributedDataParallel\(net\)"
    ):
        train(TorchState(net=net, optimizer=sgd(net)), sgd(net), model=net)
    assert torch.equal(net.weight, before)


def test_a_module_whose_gradients_are_averaged_by_hand_is_right() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = sgd(net)

    @elastic
    def steps(state: TorchState) -> None:
        net(torch.ones(3, 2)).sum().backward()
        for parameter in net.parameters():
            parameter.grad = allreduce(parameter.grad)
        optimizer.step()

    steps(TorchState(net=net, optimizer=optimizer))


def test_a_wrapper_that_the_garbage_collector_does_not_list_is_known() -> None:
    net = torch.nn.Linear(2, 1)
    model = DistributedDataParallel(net)
    gc.freeze()
    try:
        train(TorchState(model=model), sgd(net), model=model)
    finally:
        gc.unfreeze()


def test_a_copy_of_a_wrapper_that_failed_is_not_taken_for_one() -> None:
    net = torch.nn.Linear(2, 1)
    model = DistributedDataParallel(net)
    other = DistributedDataParallel(torch.nn.Linear(2, 1))
    other.module.generators = (row for row in ())  # type: ignore[assignment]
    with pytest.raises(TypeError, match="generator") as failed:
        copy.deepcopy(other)
    train(TorchState(model=model), sgd(net), model=model)
    assert failed.tb is not None  # and its frames hold the copy


def test_wrapped_modules_and_those_of_each_rank_are_right_and_so_is_what_trains_later() -> None:
    net, mine, other = (torch.nn.Linear(2, 1) for _ in range(3))
    model = DistributedDataParallel(net)
    train(TorchState(model=model), sgd(net), model=model)
    train(TorchState(model=net), sgd(net), model=model)  # the State holds the module alone
    train(TorchState(model=model, local={"mine": mine}), sgd(mine), model=mine)
    train(TorchState(model=model, teacher=other), sgd(net), model=model)
    train(TorchState(model=other), model=other)
    sgd(other).step()
