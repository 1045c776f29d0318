"""Loading a kept state: in place, and never so that later steps change what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spark_elastic.loading import load_state_dict
from spark_elastic.snapshot import cloned


def trained(kind: type[torch.optim.Optimizer], steps: int, **settings: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(steps)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


def tensors(state: Any) -> list[torch.Tensor]:
    return [
        tensor for entry in state["state"].values() for tensor in entry.values() if isinstance(tensor, torch.Tensor)
    ]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("steps_of_target", [0, 1, 5])
def test_an_optimizer_gets_what_was_kept_and_leaves_it_as_it_is(
    kind: type[torch.optim.Optimizer], steps_of_target: int
) -> None:
    kept = cloned(trained(kind, 3)[1].state_dict())
    untouched = cloned(kept)
    model, optimizer = trained(kind, steps_of_target)
    optimizer.param_groups[0]["lr"] = 7.0
    load_state_dict(optimizer, kept)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(map(torch.equal, tensors(optimizer.state_dict()), tensors(kept)))
    step(model, optimizer)
    assert all(map(torch.equal, tensors(kept), tensors(untouched)))
    assert not all(map(torch.equal, tensors(optimizer.state_dict()), tensors(kept)))


def test_an_optimizer_with_the_same_tensors_keeps_them() -> None:
    _, optimizer = trained(torch.optim.Adam, 2)
    before = [tensor.data_ptr() for tensor in tensors(optimizer.state_dict())]
    load_state_dict(optimizer, cloned(trained(torch.optim.Adam, 5)[1].state_dict()))
    assert [tensor.data_ptr() for tensor in tensors(optimizer.state_dict())] == before


def test_an_optimizer_of_other_parameters_is_refused_by_itself() -> None:
    _, optimizer = trained(torch.optim.Adam, 1)
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="parameter"):
        load_state_dict(optimizer, other.state_dict())


def test_a_module_copies_and_clears_its_gradients() -> None:
    model, _ = trained(torch.optim.SGD, 1)
    kept = cloned(model.state_dict())
    untouched = cloned(kept)
    load_state_dict(model, kept)
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(kept["weight"], untouched["weight"])


class Counting(torch.nn.Module):
    """Keeps a tensor as extra state, by reference."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def get_extra_state(self) -> torch.Tensor:
        return self.count

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state


def test_extra_state_of_a_module_does_not_share_the_kept_tensor() -> None:
    model = torch.nn.Sequential(Counting())
    kept = cloned(model.state_dict())
    load_state_dict(model, kept)
    model[0].count += 1
    assert kept["0._extra_state"] == 0


def test_other_objects_get_tensors_of_their_own() -> None:
    class Average:
        def __init__(self) -> None:
            self.mean = torch.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean = state["mean"]

    kept = {"mean": torch.ones(2)}
    average = Average()
    load_state_dict(average, kept)
    average.mean += 1
    assert torch.equal(kept["mean"], torch.ones(2))
