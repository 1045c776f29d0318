"""Gives all ranks the tensors of rank 0, in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def broadcast_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors with those of rank 0 in torch's default group. Blocks until they have arrived.

    All ranks have to give as many, of equal shapes, dtypes and strides. The tensors may have gaps in memory, or be expanded.
    """
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in map(_without_repeats, tensors):
            # Libraries send and fill the memory from a tensor's first element on, as if it had no gaps.
            dense = tensor.contiguous()
            dist.broadcast(dense, 0)
            if dense is not tensor:
                with torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(dense)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that ``expand`` has repeated, in the same memory: torch refuses to copy into the repeats."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
