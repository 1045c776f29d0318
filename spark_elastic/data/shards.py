"""Shards of a global batch: the rows of each, and the rank that computes it.

A loader with ``shards=V`` cuts every global batch at v * rows // V, whatever the world, and gives each rank whole shards.
Therefore the result of a shard does not depend on the number of workers; ``worker/shards`` adds up the results in an order that
does not, either. A batch of fewer rows than V has empty shards, which add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


def shards_of(shards: int, rank: int, size: int, shares: tuple[int, ...] = ()) -> range:
    """Return the consecutive shards that a rank computes.

    shares: how many shards each rank computes; empty for numbers that differ by at most 1.
    """
    if shares:
        first = sum(shares[:rank])
        return range(first, first + shares[rank])
    return range(rank * shards // size, (rank + 1) * shards // size)


@dataclass(frozen=True, slots=True)
class Part:
    """One shard on the rank that computes it: its rows there, counted from 0, and its share of the global batch's rows."""

    shard: int
    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True)
class Cut:
    """How a global batch is cut. ``place`` (seed, epoch, first row) distinguishes the batch from all others of a training run.

    ``is_divided``: whether the loader delivers the batch as a list of parts; if not, its tensors have yet to be cut.
    ``shares``: how many shards each rank computes; empty for even shares.
    """

    shards: int
    rows: int
    place: tuple[int, ...] = ()
    is_divided: bool = False
    shares: tuple[int, ...] = ()

    def shards_of(self, rank: int, size: int) -> range:
        """Return the shards that a rank computes in a world of ``size``."""
        return shards_of(self.shards, rank, size, self.shares)

    @property
    def largest(self) -> int:
        """The number of rows of the largest shard."""
        return -(-self.rows // self.shards)

    @property
    def shard_rows(self) -> list[int]:
        """The number of rows of each shard."""
        return [self._bound(shard + 1) - self._bound(shard) for shard in range(self.shards)]

    def rank_rows(self, size: int) -> tuple[int, ...]:
        """Return how many rows each rank has in a world of ``size``."""
        ranges = [self.shards_of(rank, size) for rank in range(size)]
        return tuple(self._bound(mine.stop) - self._bound(mine.start) for mine in ranges)

    def parts(self, rank: int, size: int) -> list[Part]:
        """Return the non-empty shards that this rank computes.

        A rank without rows gets up to two rows of another rank, as a part of weight 0, so that code after the loop can rely on
        the loop having run.
        """
        mine = self.shards_of(rank, size)
        first = self._bound(mine.start)
        bounds = [(shard, self._bound(shard), self._bound(shard + 1)) for shard in mine]
        parts = [
            Part(shard, start - first, stop - first, (stop - start) / self.rows)
            for shard, start, stop in bounds
            if stop > start
        ]
        return parts or [Part(mine.start, 0, min(self.rows, 2), 0.0)]

    def _bound(self, shard: int) -> int:
        return shard * self.rows // self.shards
