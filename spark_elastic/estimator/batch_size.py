"""Picks the batch size of a fit whose Params give none, and the number of workers that it suffices for.

It is a global batch size and depends on the data alone. So steps hold the same rows however many workers come and go, and a run
that continues elsewhere with more or fewer workers keeps its steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

LEAST_ROWS = 32
MOST_ROWS = 4096
# 64 MiB as 32-bit floats. A single worker has to have room for the whole batch, because the others may leave.
MOST_NUMBERS = 2**24
# The fewest rows of a batch per worker or shard, so that a step is not all overhead and BatchNorm has rows for its statistics.
LEAST_SHARE = 8


def pick_batch_size(rows: int, width: int, shards: int | None = None) -> int:
    """Return the global batch size: a power of two, unless each of ``shards`` would get fewer rows than a worker may.

    It is the power nearest to the square root of ``rows``, so that an epoch has about as many steps as a step has rows: 32 rows
    per step for 1,000, 256 for 100,000, 1,024 for 1,000,000. width: the numbers in a row; wide rows get smaller batches.
    """
    nearest = 1 << rows.bit_length() // 2
    fitting = 1 << max(MOST_NUMBERS // max(width, 1), 1).bit_length() - 1
    least = max(LEAST_ROWS, shards or 0, min(LEAST_SHARE * (shards or 0), fitting))
    return max(least, min(nearest, fitting, MOST_ROWS))


def enough_workers(batch_size: int) -> int:
    """Return the number of workers for which a global batch is large enough."""
    return max(batch_size // LEAST_SHARE, 1)


def width_of(sample: Mapping[str, torch.Tensor]) -> int:
    """Return how many numbers a row has in all columns together; the mean if lists have different lengths."""
    return sum(
        -(-(values.values() if values.is_nested else values).numel() // max(len(values), 1))
        for values in sample.values()
    )
