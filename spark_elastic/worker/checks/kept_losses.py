"""Losses that a module keeps beside its outputs, where one backward pass goes through batches of different shares."""

from __future__ import annotations

import warnings
import weakref

import torch

from spark_elastic.worker.checks.reachable import LENGTH
from spark_elastic.worker.checks.user_frames import depth_of_user

_looked_at: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def _is_loss(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad and not value.is_leaf


def warn_of_kept_losses(module: torch.nn.Module) -> None:
    """Warn, once, if parts of a module have numbers that were computed in its forward, from which gradients flow.

    They carry no mark of their forward, so their gradients get the weight of the pass: that of the batch that the pass reaches
    first or, with SyncBatchNorm, one.
    """
    if module in _looked_at:
        return
    _looked_at.add(module)
    for part in module.modules():
        for name, value in vars(part).items():
            if any(map(_is_loss, value if isinstance(value, (list, tuple)) and len(value) <= LENGTH else [value])):
                warnings.warn(
                    f"{type(part).__name__}.{name} is kept beside the outputs of a model: in a loss of batches in which ranks "
                    "have different shares, or with SyncBatchNorm, its gradient is not weighted by the rows of its batch. Let "
                    "forward return it",
                    stacklevel=depth_of_user(),
                )
