"""Steps of wrapped models, compared with the mean of what all ranks would compute by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spark_elastic.worker.ddp.wrapper import DistributedDataParallel

STEPS = 4


class Net(nn.Sequential):
    """Of a class of its own: what torch's containers do is not compiled where a wrapper calls them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](torch.tanh(self[0](x)))  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def steps(model: Any, rank: int, size: int) -> Iterator[float]:
    """Take steps with other rows on each rank; yield how far the gradient is from the mean of all ranks'."""
    parameters = list(model.parameters())
    for number in range(STEPS):
        inputs = [
            torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + other)) for other in range(size)
        ]
        expected = [
            sum(torch.autograd.grad(model.module(x).square().mean(), parameters)[place] for x in inputs) / size
            for place in range(len(parameters))
        ]
        for parameter in parameters:
            parameter.grad = None
        model(inputs[rank]).square().mean().backward()
        mine = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        everybody = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(everybody, mine)
        assert all(torch.equal(everybody[0], other) for other in everybody), "ranks have other gradients"
        whole = torch.cat([gradient.reshape(-1) for gradient in expected])
        yield float((mine - whole).norm() / whole.norm())


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(3, 2))
