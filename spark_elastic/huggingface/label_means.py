"""Determines whether a loss is a mean over labels or over rows, by computing it for two rows, together and separately.

The second row is a copy of the first with fewer labels. A mean over labels gives it less weight, a mean over rows the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

# A batch as a Trainer has it: tensors, and whatever else a model takes, by the names of its arguments.
Inputs = dict[str, Any]
# The label that losses ignore.
IGNORED = -100
# The smallest relative difference between the two means that cannot be due to rounding.
_TOLD_APART = 1e-4


def averages_labels(
    loss: Callable[[Inputs], float], inputs: Inputs, count: Callable[[torch.Tensor], int]
) -> bool | None:
    """Return True if ``loss`` is a mean over labels, False if it is one over rows, None if it seems to be neither.

    ``inputs`` holds tensors ``[rows, …]``, among them ``labels`` of whole numbers; ``count`` counts the labels of some rows.
    """
    labels = inputs["labels"]
    counted = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    row, half = int(counted.argmax()), -(-int(counted.max()) // 2)
    for left_out in (slice(0, half), slice(-half, None)):
        both: Inputs = {name: _repeated(value, row, len(labels)) for name, value in inputs.items()}
        shown = both["labels"][1].reshape(-1)  # a view
        shown[torch.nonzero(shown != IGNORED).flatten()[left_out]] = IGNORED
        if (found := _compare(loss, both, count)) is not None:
            return found
    return None


def _compare(loss: Callable[[Inputs], float], both: Inputs, count: Callable[[torch.Tensor], int]) -> bool | None:
    """Compare the loss of two rows together with the two means of their separate losses."""
    (first, more), (second, fewer) = (_mean_of(loss, both, row, count) for row in (slice(0, 1), slice(1, 2)))
    if more + fewer == 0:
        return None
    together, over_rows = loss(dict(both)), (first + second) / 2
    over_labels = (first * more + second * fewer) / (more + fewer)
    difference = abs(over_labels - over_rows)
    if not math.isfinite(together + difference) or difference <= _TOLD_APART * abs(together):
        return None
    if abs(together - over_labels) < difference / 4:
        return True
    return False if abs(together - over_rows) < difference / 4 else None


def _mean_of(
    loss: Callable[[Inputs], float], both: Inputs, row: slice, count: Callable[[torch.Tensor], int]
) -> tuple[float, int]:
    """Return the loss of one of the two rows, and its number of labels. Without labels, the loss is 0."""
    one = {
        name: value[row] if isinstance(value, torch.Tensor) and value.dim() else value for name, value in both.items()
    }
    number = count(one["labels"])
    return (loss(one) if number else 0.0), number


def _repeated(value: object, row: int, rows: int) -> object:
    """Return a tensor with the given row twice; other values unchanged."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if len(value) != rows:
        raise ValueError(f"a tensor of {len(value)} among those of {rows} rows")
    return torch.cat([value[row : row + 1]] * 2)
