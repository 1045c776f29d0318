"""Every state of the weights that any rank has ever computed, and how it was made."""

from __future__ import annotations

from collections import Counter


class Ledger:
    """Records weights as numbers. The initial weights are 0."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._made_of: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]

    def weights_after(self, before: int, epoch: int, rows: tuple[int, ...]) -> int:
        """Return the weights after a step on these rows from the weights ``before``."""
        made_of = (before, epoch, rows)
        if made_of not in self._names:
            self._names[made_of] = len(self._made_of)
            self._made_of.append(made_of)
        return self._names[made_of]

    def rows_of(self, weights: int) -> dict[int, Counter[int]]:
        """Count how often each row of each epoch was trained on in the history of these weights."""
        counted: dict[int, Counter[int]] = {}
        while weights:
            weights, epoch, rows = self._made_of[weights]
            counted.setdefault(epoch, Counter()).update(rows)
        return counted
