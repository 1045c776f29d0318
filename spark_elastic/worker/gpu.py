"""A worker's use of its GPU, as torch reports it."""

from __future__ import annotations

import torch

from spark_elastic.protocol.reports import GpuUsed


def use_of_gpu() -> GpuUsed | None:
    """Return this process's use of its current GPU; None while it uses none.

    Call this on the user's thread: torch's allocator may keep its lock for as long as a kernel runs.
    """
    if not torch.cuda.is_initialized():
        return None
    return GpuUsed(torch.cuda.memory_reserved(), _utilization())


def _utilization() -> int | None:
    """Return the percentage that ``nvidia-smi`` shows; None if NVML or its package is missing, and for a MIG slice."""
    try:
        return torch.cuda.utilization()
    except Exception:  # NVML's package raises its own exceptions
        return None
