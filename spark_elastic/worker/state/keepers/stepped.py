"""Weights that optimizers step, of which a commit in place keeps no copy: whether anything else has changed them since."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_elastic.worker.state.inference import versions_of
from spark_elastic.worker.state.keepers.unstepped import some_of


class SteppedWeights:
    """The weights that one State's optimizers step, as of the last commit.

    Versions show what was written to them, but not through ``.data``. For that, some values of the first one are looked at:
    code that replaces weights, by their averages for example, replaces all of them.
    """

    def __init__(self) -> None:
        self._weights: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []
        self._values: list[torch.Tensor] = []

    def note(self, weights: Sequence[torch.Tensor]) -> None:
        """Note these weights, which are those of a commit."""
        self._weights = weights
        self._versions = versions_of(weights)
        self._values = self._look()

    def have_changed(self) -> bool:
        """Whether they have other values now. May wait for a GPU."""
        return self._versions != versions_of(self._weights) or not all(map(torch.equal, self._look(), self._values))

    def _look(self) -> list[torch.Tensor]:
        first = next((weight for weight in self._weights if weight.numel()), None)
        # A copy, and as bytes, so that NaN equals NaN.
        return [] if first is None else [torch.cat([some_of(first.detach())]).view(torch.uint8)]
