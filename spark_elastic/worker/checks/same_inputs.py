"""Detects that all ranks give their models the same inputs, which means that the rows were not divided.

This is checked at the first commits if no loader of the State delivers the rows: a digest of the inputs that wrapped models were
given since the last commit travels with the commit. A single difference settles the question, and the check costs nothing from
then on. Inputs that are the same at every commit, such as constants, prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_elastic.worker.checks.fingerprint import digest_of_bits

# The number of commits with the same inputs on all ranks, different ones each time, that cannot be a coincidence.
ENOUGH = 3
# How many commits are examined, and how many inputs before each. Limited, because a digest takes time and waits for the GPU.
LOOKS = 16


class SameInputs:
    """Compares the inputs of this process's models since the last commit with those of other ranks. Used by the user's thread."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the check: an elastic function is entered for the first time."""
        self._is_settled = False
        self._looks = 0
        self.begin()

    def begin(self) -> None:
        """Begin a generation."""
        self._digest = self._noted = 0
        self._alike: set[int] = set()

    def note(self, inputs: Sequence[torch.Tensor]) -> None:
        """Note the inputs of a forward with gradients that no loader of the State has delivered."""
        if not self._is_settled and self._noted < LOOKS and inputs:
            self._noted += 1
            self._digest = hash((self._digest, *((*value.shape, digest_of_bits(value)) for value in inputs)))

    def report(self) -> int:
        """Return this rank's digest for a commit; 0 if there were no inputs."""
        digest, self._digest, self._noted = self._digest, 0, 0
        return digest

    def read(self, everybody: Sequence[int]) -> bool:
        """Evaluate the digests of all ranks. Return whether they prove that all ranks are given the same inputs."""
        if self._is_settled or not any(everybody):
            return False
        self._looks += 1
        self._alike.add(everybody[0])
        found = len(self._alike) == ENOUGH
        self._is_settled = found or len(set(everybody)) > 1 or self._looks == LOOKS
        return found and len(set(everybody)) == 1


# There is one for each process, just as torch has one default group.
same_inputs = SameInputs()
