"""What cannot be marked at the border of a forward is warned of, where it could get the weight of another batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from spark_elastic.data.deliveries import deliveries
from spark_elastic.worker import boundaries
from spark_elastic.worker.boundaries import mark_outputs, tensors_of


class Forward:
    """A forward of weight 1."""

    weight = 1.0

    def differs(self) -> None: ...

    def enter_backward(self) -> None: ...


class Result:
    def __init__(self, value: Any) -> None:
        self.value = value


class Results(dict[str, torch.Tensor]):
    pass


@pytest.fixture
def loaders() -> Iterator[list[object]]:
    made: list[object] = [object(), object()]
    deliveries._kept.clear()  # what loaders of other tests in this process have delivered
    yield made
    for loader in made:
        deliveries.forget(loader)
    boundaries._told.clear()


def output() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


@pytest.mark.parametrize("made", [lambda: Result(output()), lambda: Result([output()]), lambda: Results(out=output())])
def test_a_result_that_cannot_be_marked_is_warned_of_once_if_there_are_several_loaders(made: Any, loaders: Any) -> None:
    for number, loader in enumerate(loaders):
        deliveries.note(loader, torch.ones(2), (2, 3), 0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            given = made()
            assert mark_outputs([given, given], Forward(), None) == [given, given]
        assert len(told) == number
        assert all(f"a model has returned a {type(given).__name__}" in str(each.message) for each in told)


def test_results_that_can_be_marked_or_have_no_gradients_are_not_warned_of(loaders: Any) -> None:
    for loader in loaders:
        deliveries.note(loader, torch.ones(2), (2, 3), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        likely = torch.distributions.Normal(output(), 1.0)
        values = [likely, {"out": output()}, Result(torch.ones(2)), nn.Linear(1, 1), "name", None]
        marked = mark_outputs(values, Forward(), None)
    assert marked[0] is not likely
    assert marked[0].loc.grad_fn is not likely.loc.grad_fn
    assert likely.loc in set(tensors_of([likely]))
