"""DistributedDataParallel without a network: as it is outside a job, and how ranks are weighted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.parallel import DistributedDataParallel


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(3, 2))


def test_it_calls_the_module_as_it_is_outside_a_job() -> None:
    model, inputs = wrapped(), torch.ones(4, 3)
    assert torch.equal(model(inputs), model.module(inputs))


def test_gradients_are_those_of_the_module() -> None:
    model = wrapped()
    model(torch.ones(4, 3)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 3), 4.0))


def test_gradients_accumulate_without_sync() -> None:
    model = wrapped()
    with model.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 3), 2.0))


def test_its_state_dict_is_named_as_torchs() -> None:
    assert list(wrapped().state_dict()) == ["module.weight", "module.bias"]


def test_its_parameters_and_modes_are_those_of_the_module() -> None:
    model = wrapped()
    assert [id(parameter) for parameter in model.parameters()] == [id(p) for p in model.module.parameters()]
    assert list(dict(model.named_modules())) == ["", "module"]
    assert model.eval().module.training is False


@pytest.mark.parametrize("name", ["process_group", "init_sync", "device_ids", "output_device"])
def test_what_changes_with_the_generation_may_not_be_given(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DistributedDataParallel(torch.nn.Linear(1, 1), **{name: None})


def test_arguments_that_torch_does_not_know_are_refused() -> None:
    DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        DistributedDataParallel(torch.nn.Linear(1, 1), foo=1)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="not function"):
        DistributedDataParallel(lambda x: x)


def test_rows_are_not_negative() -> None:
    with pytest.raises(ValueError, match="-1"):
        wrapped().set_rows(-1)


def test_rows_may_be_set_and_forgotten_outside_a_job() -> None:
    model = wrapped()
    model.set_rows(3)
    model.forget_rows()
    model(torch.ones(1, 3)).sum().backward()


def weight_of(rank: int, rows: list[int]) -> float:
    model = wrapped()
    object.__setattr__(model, "_world", SimpleNamespace(rank=rank, size=len(rows)))
    model.follow_rows(SimpleNamespace(batch_rows=rows))
    return model.weight()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
@settings(deadline=None)
def test_torchs_mean_over_ranks_becomes_the_mean_over_rows(rows: list[int]) -> None:
    gradients = [torch.arange(count, dtype=torch.float64) + rank for rank, count in enumerate(rows)]
    means = [gradient.mean() if len(gradient) else torch.tensor(0.0) for gradient in gradients]
    reduced = sum(weight_of(rank, rows) * mean for rank, mean in enumerate(means)) / len(rows)
    assert torch.allclose(reduced, torch.cat(gradients).mean())


def test_equal_shares_weigh_exactly_one() -> None:
    assert [weight_of(rank, [5, 5, 5]) for rank in range(3)] == [1.0, 1.0, 1.0]


def test_a_repeated_batch_weighs_nothing() -> None:
    assert weight_of(1, [4, 0]) == 0.0


def test_a_global_batch_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rank has a row"):
        weight_of(0, [0, 0])


def test_a_loader_of_another_world_weighs_nothing_in() -> None:
    model = wrapped()
    object.__setattr__(model, "_world", SimpleNamespace(rank=0, size=3))
    model.follow_rows(SimpleNamespace(batch_rows=[1, 2]))
    assert model.weight() == 1.0


def test_rows_set_by_hand_override_those_of_the_loader() -> None:
    model: Any = wrapped()
    object.__setattr__(model, "_world", SimpleNamespace(rank=0, size=2))
    model.follow_rows(SimpleNamespace(batch_rows=[1, 1]))
    done = SimpleNamespace(wait=lambda: None)
    object.__setattr__(model, "_rows", (3.0, torch.tensor([4.0], dtype=torch.float64), done))
    assert model.weight() == 1.5
    model.forget_rows()
    assert model.weight() == 1.0


def test_a_gradient_is_weighted_once_where_one_output_depends_on_another() -> None:
    import torch

    from spark_elastic.parallel import _Weigh

    class Half:
        def weight(self) -> float:
            return 0.5

    x = torch.ones(1, requires_grad=True)
    first = x * 1
    second = first * 1
    outputs = [_Weigh.apply(output, Half()) for output in (first, second)]
    outputs[1].backward()
    assert x.grad.item() == 0.5
