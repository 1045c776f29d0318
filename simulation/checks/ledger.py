"""Every state of the weights that any rank has ever computed, and what it was made of."""

from __future__ import annotations

from collections import Counter


class Ledger:
    """Weights are numbers; 0 are the first ones."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._made_of: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]

    def weights_after(self, before: int, epoch: int, rows: tuple[int, ...]) -> int:
        """The weights that a step on these rows makes of those before it."""
        made_of = (before, epoch, rows)
        if made_of not in self._names:
            self._names[made_of] = len(self._made_of)
            self._made_of.append(made_of)
        return self._names[made_of]

    def rows_of(self, weights: int) -> dict[int, Counter[int]]:
        """How often each row of each epoch has been trained on in the history of these weights."""
        counted: dict[int, Counter[int]] = {}
        while weights:
            weights, epoch, rows = self._made_of[weights]
            counted.setdefault(epoch, Counter()).update(rows)
        return counted
