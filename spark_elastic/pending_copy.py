"""PendingCopy: a commit's copy that a GPU is still making.

A commit only enqueues its copy, behind the step on the same stream, and training goes on. An abort ends the step's
reductions without a result, and the stream then runs what is queued behind them, the copy among it. So the order decides:
a copy that was complete ahead of the abort is whole, any other is none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class PendingCopy:
    """Made on the thread that has enqueued the copy. ``before_abort`` may come from any thread, at any time."""

    def __init__(self, events: Iterable[torch.cuda.Event]) -> None:
        self._events = list(events)
        # Whether it was complete when the group was aborted; None if it was not aborted.
        self.outran_abort: bool | None = None

    def before_abort(self) -> None:
        """Look whether the copy is complete; whoever aborts the group calls this first."""
        try:
            self.outran_abort = all(event.query() for event in self._events)
        except RuntimeError:  # an earlier failure of the GPU, which the thread that uses it will meet
            self.outran_abort = False

    def wait(self) -> None:
        """Block until nothing is copied any more, whole or not."""
        for event in self._events:
            event.synchronize()


def pending_copy(sources: Iterable[torch.Tensor]) -> PendingCopy | None:
    """What the present streams of these tensors' GPUs have still to do; None where all are on the CPU."""
    devices = {tensor.device for tensor in sources if tensor.is_cuda}
    if not devices:
        return None
    events = []
    for device in devices:
        # One that waits without using a core.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return PendingCopy(events)
