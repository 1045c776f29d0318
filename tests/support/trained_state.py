"""A TorchState of a small model that has trained, and what is compared of it."""

from __future__ import annotations

import torch

from spark_elastic.worker.state.torch_state import TorchState


def trained(steps: int = 2, commit: str = "copy") -> TorchState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), epoch=0, commit=commit)
    for _ in range(steps):
        step(state)
    return state


def step(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 3)).sum().backward()
    state.optimizer.step()


def values(state: TorchState) -> list[torch.Tensor]:
    parameters = list(state.model.parameters())
    moments = [state.optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    return [tensor.detach().clone() for tensor in [*parameters, *moments]]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
