"""Whether all ranks give their models the same inputs, as rows that nobody has divided are.

Asked at the first commits, where no loader of the State delivers the rows: a digest of what wrapped models were given since the
last commit travels with the commit. One difference settles it, and costs nothing from then on. The same inputs again and
again, constants and such, prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_elastic.worker.checks.fingerprint import digest_of_bits

# So many commits with the same inputs on all ranks, and others each time, are no coincidence.
ENOUGH = 3
# So many commits are looked at: a digest waits for a GPU.
LOOKS = 16


class SameInputs:
    """What this process's models were given since the last commit, beside what others' were. Used by the user's thread."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin to ask: an elastic function is entered for the first time."""
        self._is_settled = False
        self._looks = 0
        self.begin()

    def begin(self) -> None:
        """A generation begins."""
        self._digest = 0
        self._alike: set[int] = set()

    def note(self, inputs: Sequence[torch.Tensor]) -> None:
        """Note what a model is given where gradients are wanted and no loader of the State has delivered it."""
        if not self._is_settled and inputs:
            self._digest = hash((self._digest, *((*value.shape, digest_of_bits(value)) for value in inputs)))

    def report(self) -> int:
        """Return what this rank says at a commit; 0 where there is nothing to say."""
        digest, self._digest = self._digest, 0
        return digest

    def read(self, everybody: Sequence[int]) -> bool:
        """Look at what all ranks said. Return whether that settles that they get the same."""
        if self._is_settled or not any(everybody):
            return False
        self._looks += 1
        self._alike.add(everybody[0])
        found = len(self._alike) == ENOUGH
        self._is_settled = found or len(set(everybody)) > 1 or self._looks == LOOKS
        return found and len(set(everybody)) == 1


# The one of this process, as torch's default group is.
same_inputs = SameInputs()
