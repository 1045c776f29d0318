"""PendingCopy: a commit's copy that a GPU is still making.

A commit only enqueues its copy, after the step on the same stream, and training continues. When NCCL aborts, the reductions of
the step end with meaningless values, on this rank and possibly on its neighbours, and the stream then runs what is queued after
them, including the copy. So the order matters: a copy that was complete before any rank aborted is valid, any other is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PendingCopy:
    """A copy that the current stream of the GPU has yet to finish. Created on the thread that enqueued it.

    All ranks ``look`` before any rank that has entered a collective aborts.
    """

    # Whether the copy was complete when all ranks looked; None if they have not looked.
    was_made: bool | None = None

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        # Referring to the tensors keeps their memory from being reused while the GPU reads them.
        self._sources: Sequence[torch.Tensor] = sources
        # The GPU writes this mark after the copy. Asking CUDA instead could block, or hold up the interpreter, when peers are
        # gone.
        self._mark = torch.zeros(1, pin_memory=True)
        self._mark.copy_(torch.ones(1, device="cuda"), non_blocking=True)
        # A thread that waits for a blocking event sleeps; with any other event it would spin on a whole core.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def is_made(self) -> bool:
        """Whether the copy is complete. Callable from any thread; does not ask CUDA."""
        return bool(self._mark.item())

    def wait(self) -> None:
        """Block until the GPU has finished the copy, whether it is valid or not."""
        self._event.synchronize()
        self._sources = ()

    def look(self) -> None:
        """Remember whether the copy is complete. Later calls change nothing."""
        if self.was_made is None:
            self.was_made = self.is_made()


def pending_copy(sources: Sequence[torch.Tensor]) -> PendingCopy | None:
    """Return a handle on the copy of ``sources`` that has just been enqueued; None if no GPU is in use."""
    return PendingCopy(sources) if torch.cuda.is_initialized() else None
