"""Buffers that training changes and commits leave out are named; caches that are filled once are not."""

from __future__ import annotations

import torch
from torch import nn

from spark_elastic.worker.checks.unkept_buffers import STEPS, UnkeptBuffers


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("moving", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(2))
        for name in ("constant", "filled", "grown"):
            self.register_buffer(name, torch.tensor([0.0, torch.nan]), persistent=False)

    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {f"renamed.{name}": value for name, value in super().state_dict().items()}

    def step(self, number: int) -> None:
        self.kept += 1
        self.inner.moving += 1
        self.filled.fill_(1.0)
        self.grown = torch.zeros(number)


def looked(step: int) -> list[str]:
    model, buffers, found = Buffers(), UnkeptBuffers(), []
    for number in range(1, 8):
        model.step(number)
        found.append(buffers.look(number, {"model": [model], "other": 1}))
    return found[step - 1]


def test_a_buffer_that_changes_at_every_step_is_named_once() -> None:
    assert looked(STEPS[-1]) == ["state.model[0].inner.moving"]
    assert [looked(step) for step in range(1, 8) if step != STEPS[-1]] == [[]] * 6
