"""The small collectives: what they give back, and what they leave alone."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker import collectives
from tests.support.forked_world import on_ranks, world


@pytest.fixture(params=[1, 2])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of a world whose ranks all hold the same."""
    world = SimpleNamespace(size=request.param, is_broken=lambda: False)
    monkeypatch.setattr(collectives, "current_world", lambda: world)

    def all_reduce(tensor: torch.Tensor, operation: object) -> None:
        if operation == dist.ReduceOp.SUM:
            tensor.mul_(world.size)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", lambda everybody, mine: [each.copy_(mine) for each in everybody])
    return int(request.param)


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_an_allreduce_leaves_its_argument_as_it_is_and_returns_another_tensor(op: str, size: int) -> None:
    given = torch.tensor([1.0, 2.0], requires_grad=True)
    result = collectives.allreduce(given, op)
    assert result.tolist() == [1.0 * (size if op == "sum" else 1), 2.0 * (size if op == "sum" else 1)]
    result.zero_()
    assert given.tolist() == [1.0, 2.0]


def test_the_mean_of_whole_numbers_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="op='sum'"):
        collectives.allreduce(torch.tensor([1, 2]))


def test_the_sum_of_bools_is_refused(size: int) -> None:
    """Two ranks of which both say True are not one."""
    with pytest.raises(ValueError, match="convert the tensor to int64"):
        collectives.allreduce(torch.tensor([True]), "sum")
    assert collectives.allreduce(torch.tensor([True, False]), "max").tolist() == [True, False]


# What rank 0 and rank 1 call, and what the error tells of it.
UNLIKE = {
    "another op": (
        [(torch.ones(2), "max"), (torch.ones(2), "sum")],
        'rank 0 with op="max" of torch.float32 [2] on cpu, rank 1 with op="sum" of torch.float32 [2] on cpu',
    ),
    "a mean and a sum": ([(torch.ones(2), "mean"), (torch.ones(2), "sum")], 'op="mean"'),
    "another length": ([(torch.ones(3), "sum"), (torch.ones(2), "sum")], r"[3] on cpu"),
    "another shape of the same length": ([(torch.ones(3, 2), "sum"), (torch.ones(2, 3), "sum")], "[3, 2] on cpu"),
    "another dtype": ([(torch.ones(2), "sum"), (torch.ones(2).double(), "sum")], "torch.float64 [2] on cpu"),
    "bits of the same length": ([(torch.ones(2), "sum"), (torch.ones(2, dtype=torch.int32), "sum")], "torch.int32"),
}


def test_ranks_that_reduce_differently_all_get_an_error_and_can_go_on() -> None:
    for errors in zip(*on_ranks(2, _reduce_differently), strict=True):
        (name, told), *others = errors
        assert all(other == (name, told) for other in others)
        assert UNLIKE[name][1] in told


def _reduce_differently(folder: Path, rank: int) -> list[tuple[str, str]]:
    told = []
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        for name, (calls, _) in UNLIKE.items():
            tensor, op = calls[rank]
            with pytest.raises(TrainingCodeError) as error:
                collectives.allreduce(tensor, op)
            told.append((name, str(error.value)))
            assert collectives.allreduce(torch.ones(1), "sum").tolist() == [2.0]
    return told


def test_values_are_reduced_whatever_their_order_in_memory_their_type_and_nan() -> None:
    for found in on_ranks(2, _reduce_awkward_values):
        assert found["transposed"] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
        assert (found["half"], found["short"]) == (40000.0, 60000 - 2**16)
        assert (found["max"], found["min"]) == (["nan", "5.0", "-inf"], ["nan", "-3.0", "-inf"])


def _reduce_awkward_values(folder: Path, rank: int) -> dict[str, Any]:
    values = torch.arange(6.0).view(2, 3)
    extremes = torch.tensor([[float("nan"), -3.0, -math.inf], [1.0, 5.0, -math.inf]])[rank]
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        return {
            "transposed": collectives.allreduce(values if rank else values.t().contiguous().t(), "sum").tolist(),
            "half": collectives.allreduce(torch.tensor(40000.0, dtype=torch.float16)).item(),
            "short": collectives.allreduce(torch.tensor(30000, dtype=torch.int16), "sum").item(),
            **{op: list(map(str, collectives.allreduce(extremes, op).tolist())) for op in ("max", "min")},
        }
