"""PendingCopy: a commit's copy that a GPU is still making.

A commit only enqueues its copy, behind the step on the same stream, and training goes on. An abort of NCCL's ends the step's
reductions with nonsense, on this rank and possibly on its neighbours, and the stream then runs what is queued behind them, the
copy among it. So the order decides: a copy that was complete before any rank aborted is whole, any other is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PendingCopy:
    """What the present stream of the GPU has still to do. Made on the thread that has enqueued the copy of ``sources``.

    All ranks ``look`` before any that has entered a collective aborts.
    """

    # Whether it was complete when all ranks looked; None if they had no reason to.
    was_made: bool | None = None

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        # A reference to the tensors keeps their memory from being used for others while the GPU reads them.
        self._sources: Sequence[torch.Tensor] = sources
        # Written by the GPU when it comes to it: to ask CUDA could block, or hold the interpreter up, when peers are gone.
        self._mark = torch.zeros(1, pin_memory=True)
        self._mark.copy_(torch.ones(1, device="cuda"), non_blocking=True)
        # A blocking event lets the thread that waits for it sleep, where others use a whole core.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def is_made(self) -> bool:
        """Whether it is complete, from any thread, without asking CUDA."""
        return bool(self._mark.item())

    def wait(self) -> None:
        """Block until nothing is copied any more, whole or not."""
        self._event.synchronize()
        self._sources = ()

    def look(self) -> None:
        """Remember whether it is complete. Later looks change nothing."""
        if self.was_made is None:
            self.was_made = self.is_made()


def pending_copy(sources: Sequence[torch.Tensor]) -> PendingCopy | None:
    """The copy of ``sources`` that has just been enqueued, with all before it; None where no GPU is in use."""
    return PendingCopy(sources) if torch.cuda.is_initialized() else None
