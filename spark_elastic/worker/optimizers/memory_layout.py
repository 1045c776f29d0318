"""The order in which a tensor's elements lie in memory, such as that of ``channels_last``, which commits do not keep."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def laid_out(state: Mapping[str, object], parameter: torch.Tensor) -> dict[str, object]:
    """Return an optimizer's state of a parameter with each tensor of its shape in its memory layout, copied where necessary.

    Fused optimizers read a parameter and its state in the order of memory, and would pair the wrong elements. For others the
    last bits of a step may depend on it.
    """
    strides = torch.empty_like(parameter, device="meta").stride()

    def lay_out(value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.stride() == strides:
            return value
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)

    return {name: lay_out(value) for name, value in state.items()}
