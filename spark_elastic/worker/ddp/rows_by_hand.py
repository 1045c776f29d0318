"""Rows that user code has set for a step: what ``DistributedDataParallel.set_rows`` makes of this rank's gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spark_elastic.worker.world import World


class RowsByHand:
    """The argument of ``set_rows``, and the sum of it over all ranks, which is being computed."""

    def __init__(self, rows: float, world: World) -> None:
        self.rows, self._size = rows, world.size
        self._total = torch.tensor([rows], dtype=torch.float64)
        # Whether a backward pass has used these rows. If so, a later ``set_rows`` is for the next forward.
        self.was_used = False
        try:
            self._work = dist.all_reduce(self._total, async_op=True)
        except RuntimeError as error:
            raise world.lost(error) from error

    def weight(self) -> float:
        """Return the weight of this rank's gradient. Waits for all ranks. Raises ``ValueError`` if none has a row."""
        self._work.wait()
        total = float(self._total)
        if total == 0:
            raise ValueError("no rank has a row of this global batch")
        return self.rows * self._size / total
