"""What becomes of buffers when the model is made again: they are those of the commit, whatever ``build`` has made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank_sharded import held_again, made
from torch import nn
from worker_stage import Stage

from spark_elastic.worker.state.fully_sharded.buffers import buffers_of, put_buffers_back
from spark_elastic.worker.state.snapshot import cloned


class Net(nn.Module):
    """Two parts with buffers, one of which they share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.inner.register_buffer("common", torch.zeros(2))
        self.register_buffer("common", self.inner.common)
        self.register_buffer("count", torch.tensor(1))
        self.register_buffer("mask", torch.zeros(4), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("wide", torch.zeros(1).expand(3))
        self.register_parameter("scale", None)
        self.cache = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's output."""
        result: torch.Tensor = self.inner(x)
        return result


def nothing(net: Any) -> None:
    pass


def other_dtype(net: Any) -> None:
    net.count = net.count * 0.25


def number_that_no_float_has(net: Any) -> None:
    net.count = torch.tensor(2**24 + 1)
    net.mask = torch.tensor([2**24 + 1])


def fewer_entries(net: Any) -> None:
    net.mask = torch.ones(1)


def more_entries(net: Any) -> None:
    net.mask = torch.arange(9.0).view(3, 3).t()


def one_that_was_none(net: Any) -> None:
    net.later = torch.ones(3)


def one_that_is_none_now(net: Any) -> None:
    net.mask = net.inner.common = None


def another_one(net: Any) -> None:
    net.inner.register_buffer("new", torch.ones(2), persistent=False)


def one_in_place_of_an_attribute(net: Any) -> None:
    del net.cache
    net.register_buffer("cache", torch.ones(2), persistent=False)


def one_that_is_none_in_place_of_an_attribute(net: Any) -> None:
    del net.cache
    net.register_buffer("cache", None)


def one_in_place_of_a_parameter_that_is_none(net: Any) -> None:
    del net.scale
    net.register_buffer("scale", torch.ones(2))


def one_less(net: Any) -> None:
    del net.mask


def one_that_is_no_longer_shared(net: Any) -> None:
    net.common = torch.ones(2)


def one_that_is_shared_now(net: Any) -> None:
    net.later = net.mask


def one_in_inference_mode(net: Any) -> None:
    with torch.inference_mode():
        net.count = net.count + 1


CHANGES = [
    *(
        nothing,
        other_dtype,
        number_that_no_float_has,
        fewer_entries,
        more_entries,
        one_that_was_none,
        one_that_is_none_now,
    ),
    *(another_one, one_less, one_that_is_no_longer_shared, one_that_is_shared_now, one_in_inference_mode),
    *(
        one_in_place_of_an_attribute,
        one_that_is_none_in_place_of_an_attribute,
        one_in_place_of_a_parameter_that_is_none,
    ),
]


def told(net: nn.Module) -> tuple[list[tuple[torch.dtype, object]], object]:
    found = buffers_of(dict(net.named_modules()))
    return [(tensor.dtype, tensor.tolist()) for tensor in found["tensors"]], found["places"]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_training_makes_of_a_buffer_comes_back_and_may_go_on_changing(change: Callable[[Any], None]) -> None:
    first, second, third = Net(), Net(), Net()
    change(first)
    put_buffers_back(second, cloned(buffers_of(dict(first.named_modules()))))
    assert told(second) == told(first)
    assert list(second.state_dict()) == list(first.state_dict())
    second.wide = torch.ones(2)
    put_buffers_back(third, cloned(buffers_of(dict(second.named_modules()))))
    assert told(third) == told(second)


def test_a_buffer_that_fits_stays_the_same_object_with_the_commits_values() -> None:
    first, second = Net(), Net()
    first.common.fill_(math.pi)
    common, count = second.common, second.count
    put_buffers_back(second, cloned(buffers_of(dict(first.named_modules()))))
    assert second.common is second.inner.common is common
    assert second.count is count
    assert common.tolist() == [pytest.approx(math.pi)] * 2


def test_after_a_loss_a_buffer_has_the_dtype_and_shape_of_the_commit_once_and_again(stage: Stage) -> None:
    state = made(build=Net)
    stage.begin(state)
    for turn in range(1, 3):
        net: Any = state.model
        net.count = net.count * 0.5
        net.mask = torch.ones(turn)
        net.later = torch.ones(3)
        state.commit()
        net.count = net.mask = net.later = None
        held_again(stage, state)
        net = state.model
        assert (float(net.count), net.mask.tolist(), net.later.tolist()) == (0.5**turn, [1.0] * turn, [1.0] * 3)
