"""What cannot be marked at the border of a forward is warned of, where it could get the weight of another batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from spark_elastic.data.deliveries import deliveries
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.ddp import boundaries
from spark_elastic.worker.ddp.boundaries import (
    mark_outputs,
    marked_inputs,
    refuse_transforms,
    tensors_given,
    tensors_of,
)


class Forward:
    """A forward of weight 1."""

    weight = 1.0
    has_changed_inputs = False

    def changes_inputs(self) -> None:
        self.has_changed_inputs = True

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


@dataclass
class Context:
    value: Any = None
    unset: Any = field(init=False)
    parent: Any = None


def filled(container: Any, found: Any) -> None:
    """What a model does to a container that it is given: look at a tensor, replace one, add one."""
    match container:
        case list():
            container.insert(0, found * 2)
        case dict():
            container["more"] = found * 2
        case _:
            container.unset = found * 2


@pytest.mark.parametrize("make", [lambda x: [x, x], lambda x: {"x": x, "inner": [x]}, lambda x: Context(x)])
def test_a_model_is_given_the_callers_own_containers_which_have_their_tensors_back_afterwards(make: Any) -> None:
    given = output()
    container = make(given)
    with marked_inputs(((given, container), {"again": container}), Forward()) as (args, kwargs):
        assert args[1] is container
        assert kwargs["again"] is container
        (marked, *others) = tensors_of(args)
        assert marked is not given
        assert all(other is marked for other in others), "one tensor stays one"
        filled(container, marked)
    found = [tensor for tensor in tensors_of(container) if tensor is not given]
    assert len(found) == 1
    assert found[0].grad_fn is not None, "what the model has added stays"
    assert sum(tensor is given for tensor in tensors_of(container)) == sum(1 for _ in tensors_of(make(given)))


def test_containers_get_their_tensors_back_if_the_model_fails() -> None:
    given = output()
    container = [given]

    def fail() -> None:
        assert container[0] is not given
        raise KeyError

    with pytest.raises(KeyError), marked_inputs((container,), Forward()):
        fail()
    assert container[0] is given


def test_a_tuple_is_made_anew_and_what_holds_it_is_filled() -> None:
    given = output()
    container = {"pair": (given, 1)}
    with marked_inputs((container,), Forward()) as (entered,):
        assert entered is container
        assert container["pair"][0] is not given
    assert tensors_given((given, given), {}) == [given, given]


def test_dataclasses_may_have_cycles_and_unset_fields() -> None:
    child, parent = Context(output()), Context()
    child.parent, parent.parent = parent, child
    assert len(list(tensors_of(child))) == 1
    own = child.value
    with marked_inputs((child,), Forward()):
        assert child.value is not own
    assert child.value is own
    marked = mark_outputs(child, Forward(), None)
    assert marked.value is not own
    assert not hasattr(marked, "unset")


@pytest.mark.parametrize("changes", [False, True])
def test_an_input_that_the_model_changes_in_place_is_changed_for_the_caller_and_its_gradients_too(
    changes: bool,
) -> None:
    source, forward = torch.ones(3, requires_grad=True), Forward()
    given = source * torch.tensor([1.0, -1.0, 2.0])
    with marked_inputs((given,), forward) as (entered,):
        result = torch.relu_(entered) if changes else torch.relu(entered)
    assert forward.has_changed_inputs == changes
    (result.sum() + given.square().sum()).backward()
    expected = torch.ones(3, requires_grad=True)
    plain = expected * torch.tensor([1.0, -1.0, 2.0])
    other = torch.relu_(plain) if changes else torch.relu(plain)
    (other.sum() + plain.square().sum()).backward()
    assert torch.equal(source.grad, expected.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["logits", "same", "flat", "other"])
def test_outputs_that_share_memory_share_what_is_written_to_one_of_them(key: str) -> None:
    def gradient(is_marked: bool) -> torch.Tensor:
        source = torch.ones(3, 2, requires_grad=True)
        hidden = source * 2
        made = {"logits": hidden, "same": hidden, "flat": hidden.view(-1), "other": source * 3}
        found = mark_outputs(made, Forward(), None) if is_marked else made
        found["logits"].mul_(3)
        found[key].sum().backward()
        assert source.grad is not None
        return source.grad

    assert torch.equal(gradient(True), gradient(False))


def test_a_single_output_can_be_detached_in_place() -> None:
    marked = mark_outputs({"hidden": output()}, Forward(), None)["hidden"]
    marked.detach_()
    assert not marked.requires_grad


def tangent_of(function: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(inputs, torch.ones_like(inputs)))).tangent


@pytest.mark.parametrize(
    "transform",
    [
        lambda function, inputs: torch.func.grad(lambda each: function(each).sum())(inputs),
        lambda function, inputs: torch.func.vmap(function)(inputs),
        lambda function, inputs: torch.func.jvp(function, (inputs,), (inputs,)),
        tangent_of,
    ],
    ids=["grad", "vmap", "jvp", "forward mode"],
)
def test_transforms_in_which_nothing_can_be_marked_are_refused(transform: Callable[..., Any]) -> None:
    module = nn.Linear(3, 1)

    def wrapped(inputs: torch.Tensor) -> torch.Tensor:
        refuse_transforms(module, [inputs])
        return torch.as_tensor(module(inputs))

    with pytest.raises(TrainingCodeError, match=r"(?s)Linear is called by its wrapper within .* create_graph=True"):
        transform(wrapped, torch.ones(2, 3))


def test_derivatives_by_autograd_are_not_refused() -> None:
    module, inputs = nn.Linear(3, 1), torch.ones(2, 3, requires_grad=True)
    refuse_transforms(module, [inputs])
    with forward_ad.dual_level():
        refuse_transforms(module, [inputs])
