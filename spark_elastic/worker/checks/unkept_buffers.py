"""Finds buffers that training changes and no commit keeps, since they were registered with ``persistent=False``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spark_elastic.worker.state.snapshot import find_objects

# At which steps of a generation buffers are compared: what changes between all of them is trained, and no cache that is filled.
STEPS = (2, 3, 4)
# Larger buffers are not compared.
NUMBERS = 1_000_000


class UnkeptBuffers:
    """Compares the non-persistent buffers of a State's modules at the first steps of a generation."""

    def __init__(self) -> None:
        self._changing: dict[str, torch.Tensor] = {}

    def look(self, step: int, shared: Mapping[str, object]) -> list[str]:
        """Take note of the buffers at a step. Return at the last one the names of those that changed between all of them."""
        if step not in STEPS:
            return []
        now = _non_persistent(shared)
        if step == STEPS[0]:
            self._changing = {name: buffer.detach().clone() for name, buffer in now.items()}
            return []
        self._changing = {
            name: now[name].detach().clone()
            for name, before in self._changing.items()
            if name in now and before.shape == now[name].shape and not torch.equal(before, now[name])
        }
        return list(self._changing) if step == STEPS[-1] else []


def _non_persistent(shared: Mapping[str, object]) -> dict[str, torch.Tensor]:
    found = {}
    for place, value in find_objects(shared).items():
        if isinstance(value, torch.nn.Module):
            kept = value.state_dict(keep_vars=True).keys()
            found.update({
                f"state.{place}.{name}": buffer
                for name, buffer in value.named_buffers()
                if name not in kept and buffer.numel() <= NUMBERS
            })  # fmt: skip
    return found
