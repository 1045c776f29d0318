"""Whether anything but an optimizer has changed the weights that it steps, of which a commit in place has no copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.state.keepers.stepped import SteppedWeights
from spark_elastic.worker.state.torch_state import TorchState

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "written to": lambda weight: weight.detach().mul_(2.0),
    "through .data": lambda weight: weight.data.mul_(2.0),
    "another tensor": lambda weight: setattr(weight, "data", torch.zeros_like(weight)),
}


def model_and_optimizer(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.Linear(40, 1)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_changes_of_any_kind_are_noticed(how: str, dtype: torch.dtype) -> None:
    model, _ = model_and_optimizer(dtype)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = float("nan")
    weights = SteppedWeights()
    weights.note(list(model.parameters()))
    assert not weights.have_changed(), "NaN is NaN"
    for weight in model.parameters():
        CHANGES[how](weight)
    assert weights.have_changed()
    weights.note(list(model.parameters()))
    assert not weights.have_changed()


def test_weights_without_numbers_do_not_change() -> None:
    weights = SteppedWeights()
    assert not weights.have_changed()
    weights.note([torch.nn.Parameter(torch.empty(0))])
    assert not weights.have_changed()


@pytest.mark.parametrize("how", CHANGES)
def test_weights_that_have_changed_since_the_last_commit_are_not_written_as_that_commit(how: str) -> None:
    """The last durable checkpoint had averages that a function had put in place of the weights to evaluate them."""
    model, optimizer = model_and_optimizer()
    state = TorchState(model=model, optimizer=optimizer, commit="in_place")
    state.commit()
    state._lend().lend()
    for weight in model.parameters():
        CHANGES[how](weight)
    with pytest.raises(SparkElasticError, match="weights have changed since the last commit"):
        state._lend().lend()
    state.commit()
    state._lend().lend()
