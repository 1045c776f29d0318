"""The small collectives: what they give back, and what they leave alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spark_elastic.worker import collectives


@pytest.fixture(params=[1, 2])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of a world whose ranks all hold the same."""
    world = SimpleNamespace(size=request.param, is_broken=lambda: False)
    monkeypatch.setattr(collectives, "current_world", lambda: world)

    def all_reduce(tensor: torch.Tensor, operation: object) -> None:
        if operation == dist.ReduceOp.SUM:
            tensor.mul_(world.size)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
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
