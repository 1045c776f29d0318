"""Counts the numbers that user code reduces over all ranks, as it does where it averages gradients by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Reductions:
    """The reductions of this process since it last began."""

    def __init__(self) -> None:
        self._numbers = 0

    def begin(self) -> None:
        """Forget what has been reduced."""
        self._numbers = 0

    def note(self, numbers: int) -> None:
        """Note a reduction of so many numbers."""
        self._numbers += numbers

    def may_average(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether enough numbers have been reduced to be the gradients of these parameters.

        Whether they were, the comparison of ranks shows at the commits.
        """
        return self._numbers >= sum(parameter.numel() for parameter in parameters)


# There is one for each process, just as torch has one default group.
reductions = Reductions()
