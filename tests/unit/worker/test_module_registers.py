"""What modules and optimizers register: what has changed, what a state dict leaves out, and which modules live."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from spark_elastic.worker.module_registers import (
    Registered,
    living,
    non_persistent_buffers,
    registers,
    same_objects,
    same_values,
    stepped,
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def exchange(model: nn.Sequential) -> None:
    model[0].weight, model[0].bias = model[0].bias, model[0].weight


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a parameter is replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter is removed": lambda model: setattr(model[0], "bias", None),
    "a part is added": lambda model: model.append(nn.ReLU()),
    "a part is removed": lambda model: model.pop(1),
    "a buffer is added": lambda model: model[1].register_buffer("more", torch.ones(1)),
    "a buffer is replaced": lambda model: setattr(model[1], "running_mean", torch.zeros(2)),
    "two parameters change places": exchange,
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_object_in_any_register_is_noticed(what: str) -> None:
    model = net()
    registered = Registered(register for part in model.modules() for register in registers(part))
    assert registered.is_current()
    CHANGES[what](model)
    assert not registered.is_current()


def test_values_that_change_in_place_are_the_same_objects() -> None:
    model = net()
    registered = Registered(register for part in model.modules() for register in registers(part))
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model(torch.rand(4, 2))
    model[0].weight.requires_grad_(False)
    assert registered.is_current()
    assert registered.names[:2] == ["0", "1"]


def test_a_module_of_torchscript_has_no_registers() -> None:
    assert registers(torch.jit.script(nn.Linear(1, 1))) == ()


def test_living_modules_are_those_of_exactly_these_classes_that_are_complete() -> None:
    class Own(nn.Linear):
        pass

    class Special(Own):
        pass

    class Uncopyable:
        def __deepcopy__(self, memo: object) -> None:
            raise ValueError("not me")

    model, _other = Own(1, 1), Special(1, 1)
    model.part = Uncopyable()
    with pytest.raises(ValueError, match="not me") as failed:
        copy.deepcopy(model)  # the traceback holds a copy that has nothing yet
    assert living(Own) == [model]
    assert failed.tb is not None


def test_an_optimizer_steps_the_parameters_of_all_its_groups() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    assert same_objects(stepped(optimizer), parameters)


def test_equal_tensors_are_not_the_same_objects_and_order_counts() -> None:
    one, other = torch.ones(1), torch.ones(1)
    assert same_objects([one, other], [one, other])
    assert not same_objects([one, other], [other, one])
    assert not same_objects([one], [one, other])


def test_buffers_that_state_dicts_omit_are_found_by_their_places() -> None:
    model = net()
    model.register_buffer("own", torch.ones(1), persistent=False)
    model[0].register_buffer("inner", torch.ones(1), persistent=False)
    model[0].register_buffer("none", None, persistent=False)
    assert list(non_persistent_buffers(model)) == ["own", "0.inner"]


def test_values_are_the_same_where_both_are_no_numbers() -> None:
    one = torch.tensor([1.0, float("nan")])
    assert same_values(one, one.clone())
    assert not same_values(one, torch.tensor([1.0, 2.0]))
    assert not same_values(torch.tensor([2.0, 1.0]), torch.tensor([2.0, float("nan")]))
