"""Which objects of a State training can depend on, and how far they are looked into."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from spark_elastic.data import ElasticDataLoader
from spark_elastic.worker.checks.reachable import DEPTH, LENGTH, find_optimizers, reachable


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_optimizers_are_found_in_containers_and_attributes() -> None:
    made = [sgd() for _ in range(4)]
    tree = {
        "plain": made[0],
        "list": [1, (made[1],)],
        "trainer": SimpleNamespace(inner={"of": made[2]}),
        "set": {made[3]},
    }
    assert find_optimizers(tree) == made


def test_an_object_that_is_there_twice_or_refers_to_itself_is_looked_at_once() -> None:
    holder: Any = SimpleNamespace(optimizer=sgd())
    holder.me = [holder, holder.optimizer]
    assert find_optimizers([holder, holder]) == [holder.optimizer]


def test_the_optimizer_of_a_scheduler_is_not_the_states_and_other_attributes_are() -> None:
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert find_optimizers([scheduler]) == []
    scheduler.other = optimizer  # type: ignore[attr-defined]
    assert find_optimizers([scheduler]) == [optimizer]


def test_modules_optimizers_and_loaders_are_found_and_not_looked_into() -> None:
    model, optimizer, loader = nn.Linear(1, 1), sgd(), ElasticDataLoader(range(4), 2)
    for holder in (model, optimizer, loader):
        holder.hidden = SimpleNamespace(optimizer=sgd())  # type: ignore[union-attr]
    assert list(reachable([model, optimizer, loader])) == [model, optimizer, loader]


def test_values_and_long_containers_of_data_are_passed_over() -> None:
    optimizer = sgd()
    assert list(reachable([1, "text", torch.ones(1), int, None])) == []
    assert find_optimizers([optimizer, *[0] * (LENGTH - 1)]) == [optimizer]
    assert find_optimizers([optimizer, *[0] * LENGTH]) == []


def test_the_search_ends_at_its_depth() -> None:
    optimizer = sgd()
    tree: Any = optimizer
    for _ in range(DEPTH):
        tree = [tree]
    assert find_optimizers(tree) == [optimizer]
    assert find_optimizers([tree]) == []
