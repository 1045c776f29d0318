"""What ranks tell each other at a commit: a row of whole numbers each, which travel in one control collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spark_elastic.data.tracker import Report


class Exchanged(NamedTuple):
    """What one rank tells at a commit. Of some values only rank 0's counts, so that all ranks decide alike."""

    # Whether the driver has told this rank that the world changes.
    is_interrupted: int
    # The index of the commit in its generation.
    commit: int
    # The digest of the tensors that have to be equal on all ranks; 0 if this commit does not compare them.
    digest: int
    # Whether the next commit is to compare tensors. Rank 0's value counts.
    asks_for_digest: int
    # What this rank's models were given, to find ranks that train on the same rows.
    inputs: int
    # How many commits later ranks exchange values again. Rank 0's value counts.
    next_after: int
    # The microseconds that this rank computes in a step; 0 if they were not measured.
    measured: int
    # Whether all ranks are to write their parts of a later commit to a durable checkpoint. Rank 0's value counts.
    writes_part: int
    # The digest of the plain values that have to be equal on all ranks; 0 if this commit does not compare them.
    plain_values: int
    # What the loader has delivered on this rank since the last exchange.
    loader: Report

    def packed(self) -> list[int]:
        """Return the row that travels."""
        return [*map(int, self[:-1]), *self.loader]

    @classmethod
    def unpacked(cls, row: Sequence[int]) -> Exchanged:
        """Return what a row says."""
        own = len(cls._fields) - 1
        return cls._make([*row[:own], Report(*row[own:])])
