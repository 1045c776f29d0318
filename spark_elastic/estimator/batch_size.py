"""The batch size of a fit whose Params give none, and for how many workers it is enough.

It is a global batch, and depends on the data alone: steps hold the same rows however many workers come and go, and a run that
continues elsewhere with more or fewer of them keeps its steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

LEAST_ROWS = 32
MOST_ROWS = 4096
# As 32-bit floats, 64 MiB. A single worker has to have room for the whole batch, because the others may leave.
MOST_NUMBERS = 2**24
# What a worker has to have of a batch, so that a step is not all overhead and BatchNorm has rows to take its statistics over.
LEAST_SHARE = 8


def pick_batch_size(rows: int, width: int, shards: int | None = None) -> int:
    """Return how many rows all workers together take in a step; a power of two, unless there have to be as many as ``shards``.

    It is the one nearest to the square root of ``rows``, so that an epoch has about as many steps as a step has rows: 32 rows a
    step for 1,000, 256 for 100,000, 1,024 for 1,000,000. width: the numbers in a row, by which wide rows get smaller batches.
    """
    nearest = 1 << rows.bit_length() // 2
    fitting = 1 << max(MOST_NUMBERS // max(width, 1), 1).bit_length() - 1
    return max(LEAST_ROWS, min(nearest, fitting, MOST_ROWS), shards or 0)


def enough_workers(batch_size: int) -> int:
    """Return for how many workers a global batch is enough."""
    return max(batch_size // LEAST_SHARE, 1)


def width_of(sample: Mapping[str, torch.Tensor]) -> int:
    """Return how many numbers a row has in all columns together; a mean where lists have different lengths."""
    return sum(
        -(-(values.values() if values.is_nested else values).numel() // max(len(values), 1))
        for values in sample.values()
    )
