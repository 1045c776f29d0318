"""Finds buffers that training changes but no commit keeps, because they were registered with ``persistent=False``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spark_elastic.worker.module_registers import non_persistent_buffers, same_values
from spark_elastic.worker.state.snapshot import find_objects

# The steps of a generation at which buffers are compared. A buffer that changes between all of them is not just a filled cache.
STEPS = (2, 3, 4)
# Larger buffers are not compared.
NUMBERS = 1_000_000


class UnkeptBuffers:
    """Compares the non-persistent buffers of a State's modules at the first steps of a generation."""

    def __init__(self) -> None:
        self._changing: dict[str, torch.Tensor] = {}

    def look(self, step: int, shared: Mapping[str, object]) -> list[str]:
        """Note the buffers at a step. At the last step, return the names of those that changed between all of them."""
        if step not in STEPS:
            return []
        now = _compared(shared)
        if step == STEPS[0]:
            self._changing = {name: buffer.detach().clone() for name, buffer in now.items()}
            return []
        self._changing = {
            name: now[name].detach().clone()
            for name, before in self._changing.items()
            if name in now and before.shape == now[name].shape and not same_values(before, now[name])
        }
        return list(self._changing) if step == STEPS[-1] else []


def _compared(shared: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {
        f"state.{place}.{name}": buffer
        for place, value in find_objects(shared).items()
        if isinstance(value, torch.nn.Module)
        for name, buffer in non_persistent_buffers(value).items()
        if buffer.numel() <= NUMBERS and buffer.layout is torch.strided
    }
