"""DistributedDataParallel without a network: as it is outside a job, and how ranks are weighted."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from averaged_steps import wrapped
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.deliveries import weight_of_rank
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.shards.loops import loops


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


def test_the_wrappers_state_dict_has_the_names_of_torchs_wrapper() -> None:
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


@pytest.mark.parametrize("rows", [-1, float("nan"), float("inf"), "a", None])
def test_rows_are_a_number_from_0_on(rows: object) -> None:
    with pytest.raises(ValueError, match=f"rows must be a number from 0 on, not {rows!r}"):
        wrapped().set_rows(rows)


def test_rows_may_be_set_and_forgotten_outside_a_job() -> None:
    model = wrapped()
    model.set_rows(3)
    model.forget_rows()
    model(torch.ones(1, 3)).sum().backward()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
@settings(deadline=None)
def test_torchs_mean_over_ranks_becomes_the_mean_over_rows(rows: list[int]) -> None:
    gradients = [torch.arange(count, dtype=torch.float64) + rank for rank, count in enumerate(rows)]
    means = [gradient.mean() if len(gradient) else torch.tensor(0.0) for gradient in gradients]
    reduced = sum(weight_of_rank(rows, rank) * mean for rank, mean in enumerate(means)) / len(rows)
    assert torch.allclose(reduced, torch.cat(gradients).mean())


def test_equal_shares_weigh_exactly_one() -> None:
    assert [weight_of_rank([5, 5, 5], rank) for rank in range(3)] == [1.0, 1.0, 1.0]


def test_a_repeated_batch_weighs_nothing() -> None:
    assert weight_of_rank([4, 0], 1) == 0.0


def test_a_global_batch_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rank has a row"):
        weight_of_rank([0, 0], 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("join", "equally many batches"),
        ("_register_builtin_comm_hook", "register_comm_hook"),
        ("will_sync_module_buffers", "torch's wrapper of one generation"),
    ],
)
def test_what_only_torchs_wrapper_has_says_why(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(wrapped(), name)


def test_other_names_are_missing_as_they_are_from_a_module() -> None:
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        _ = wrapped().weights


def test_copies_and_pickles_hold_the_module_only() -> None:
    model = wrapped()
    model.attach(SimpleNamespace(size=1))  # type: ignore[arg-type]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._here.world is None
        assert torch.equal(other(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_loop_over_parts_that_an_error_has_ended_is_forgotten_when_a_model_is_wrapped_anew() -> None:
    """As in a notebook whose cell is run again: its first commit would be refused because of the loop of before."""
    left = SimpleNamespace(put_back=lambda: None)
    loops.begin(left)
    loops.leave(left)
    DistributedDataParallel(torch.nn.Linear(1, 1))
    loops.refuse("a commit came")
