"""Memory that optimizers change, found in what an object of the State keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.live_memory import address_of, live_tensors, memory_in, refuse_live
from spark_elastic.worker.checks.reachable import LENGTH


class Stopper:
    pass


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(3, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def addresses(value: object) -> set[int]:
    return {address for address, _ in memory_in(value, "state.best")}


def test_tensors_and_arrays_are_found_in_containers_by_their_places() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    value = {"a": [tensor, 3], 1: (array,), "more": "text"}
    assert list(memory_in(value, "state.best")) == [
        (tensor.data_ptr(), "state.best['a'][0]"),
        (array.ctypes.data, "state.best[1][0]"),
    ]
    assert list(memory_in([tensor] * (LENGTH + 1), "state.data")) == []


def test_a_view_begins_where_the_memory_of_the_whole_does_and_what_has_none_begins_nowhere() -> None:
    whole = torch.ones(3, 3)
    assert address_of(whole[1:]) == address_of(whole) == whole.data_ptr()
    assert address_of(torch.ones(2, device="meta")) == 0


def test_live_tensors_of_modules_and_optimizers_are_named_by_their_places() -> None:
    model, optimizer = trained()
    assert [name for name, _ in live_tensors(model)] == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    ]  # fmt: skip
    assert {name for name, _ in live_tensors(optimizer)} == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.state["calls"] = 3  # type: ignore[index]
    list(live_tensors(optimizer))
    assert list(live_tensors(Stopper())) == []


def test_a_holder_of_what_training_changes_is_refused_with_the_place_and_the_line_to_write() -> None:
    model, optimizer = trained()
    kept = {"model": addresses(model.state_dict()), "optimizer": addresses(optimizer.state_dict()["state"])}
    with pytest.raises(TrainingCodeError, match=r"a Stopper .* weight of a BatchNorm1d.*copy\.deepcopy"):
        refuse_live(Stopper(), kept["model"], [model, optimizer])
    with pytest.raises(TrainingCodeError, match=r"a Stopper .* of a Adam"):
        refuse_live(Stopper(), kept["optimizer"], [model, optimizer])


def test_copies_buffers_and_frozen_parameters_may_be_held() -> None:
    model, optimizer = trained()
    refuse_live(Stopper(), addresses([each.clone() for each in model.state_dict().values()]), [model, optimizer])
    refuse_live(Stopper(), addresses(list(model.buffers())), [model, optimizer])
    model.requires_grad_(False)
    refuse_live(Stopper(), addresses(list(model.parameters())), [model, optimizer])
