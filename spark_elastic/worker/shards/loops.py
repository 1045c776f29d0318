"""Tracks the open loop over the parts of a batch in this process, to refuse what must not happen inside one."""

from __future__ import annotations

import threading
from typing import Protocol

from spark_elastic.data.deliveries import deliveries
from spark_elastic.errors import TrainingCodeError

HOW = (
    "Write:\n"
    "    for batch in state.loader:\n"
    "        optimizer.zero_grad()\n"
    "        for part in state.model.parts(batch):\n"
    '            loss_fn(state.model(part["x"]), part["y"]).backward()\n'
    "        optimizer.step()\n"
    "        state.commit()"
)


class Loop(Protocol):
    """A loop over parts that has begun."""

    def put_back(self) -> None:
        """Undo what the parts have done so far to gradients and buffers."""
        ...


class Loops:
    """The open loop, and whether the last one was left before its end. Used by the user's thread."""

    def __init__(self) -> None:
        self.open: Loop | None = None
        self._thread = 0
        self._is_adding = False
        self._was_left = False

    def begin(self, loop: Loop) -> None:
        """Open a loop."""
        self.refuse("a loop over model.parts(batch) began")
        self.open, self._thread, self._is_adding = loop, threading.get_ident(), False
        deliveries.trainer, deliveries.is_in_loop = self._thread, True

    def add_up(self) -> None:
        """Note that the open loop has computed its parts. Ranks meet now, to add up what these have left."""
        self._is_adding = True

    def end(self, loop: Loop) -> None:
        """Close a loop whose sums are complete."""
        if self.open is loop:
            self.open, self._is_adding, deliveries.is_in_loop = None, False, False

    def leave(self, loop: Loop) -> None:
        """Close a loop that was left early, as if it had not begun. For an abandoned loop this does nothing."""
        if self.open is loop:
            self.open, self._is_adding, self._was_left, deliveries.is_in_loop = None, False, True, False
            loop.put_back()

    def abandon(self) -> None:
        """Forget the loop: the state goes back to a commit, or a new world begins."""
        if self.open is not None:
            self.leave(self.open)
        self._was_left = False

    def refuse(self, what: str) -> None:
        """Raise ``TrainingCodeError`` if a loop is open, or was left early. ``what`` names the offending event."""
        self._refuse_open(what)
        if self._was_left:
            raise TrainingCodeError(
                f"{what} after a loop over model.parts(batch) had been left before its end, by break, return or an exception: "
                "the gradient of the batch is added up at the end, with all ranks. Let the loop end, and use its last "
                f"part. {HOW}"
            )

    def refuse_within(self, what: str) -> None:
        """Raise ``TrainingCodeError`` if this thread computes the parts of a loop, of which ranks have different numbers.

        Other threads may meet those of other ranks meanwhile, such as one that saves a checkpoint.
        """
        if not self._is_adding and self._thread == threading.get_ident():
            self._refuse_open(what)

    def _refuse_open(self, what: str) -> None:
        if self.open is not None:
            raise TrainingCodeError(
                f"{what} inside a loop over model.parts(batch), where gradients are those of one shard and not yet of the "
                f"batch. {HOW}"
            )


# There is one for each process, just as torch has one default group.
loops = Loops()
