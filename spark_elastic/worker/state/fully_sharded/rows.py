"""Tells which rows of a tensor each rank has, and where they come from when the world changes. Pure functions.

``fully_shard`` cuts each parameter along its first dimension as ``torch.chunk`` does: into chunks of equal size, of which the
last ones may be smaller or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spark_elastic.worker.state.slices import choose_slices


def bounds(rows: int, number: int, of: int) -> tuple[int, int]:
    """Return where shard ``number`` of ``of`` begins and ends."""
    chunk = -(-rows // of)
    return min(number * chunk, rows), min((number + 1) * chunk, rows)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that a new shard shares with an old one: ``start`` to ``end`` in the old, from ``place`` on in the new."""

    old: int
    start: int
    end: int
    place: int


def pieces(rows: int, number: int, of: int, of_old: int) -> Iterator[Piece]:
    """Yield the pieces of ``of_old`` old shards that make up shard ``number`` of ``of`` new ones."""
    first, last = bounds(rows, number, of)
    for old in range(of_old):
        begin, end = bounds(rows, old, of_old)
        if max(first, begin) < min(last, end):
            yield Piece(old, max(first, begin) - begin, min(last, end) - begin, max(first, begin) - first)


def choose_kept(ring: Sequence[int], redundancy: int) -> dict[int, tuple[int, ...]]:
    """Return whose shards each rank keeps: its own, and those of the next ``redundancy`` ranks of the ring."""
    size = len(ring)
    return {
        rank: tuple(sorted(ring[number] for number in choose_slices(place, size, redundancy)))
        for place, rank in enumerate(ring)
    }


def choose_giver(holders: Mapping[int, Sequence[int]], shard: int, receiver: int) -> int:
    """Choose the rank that sends an old shard to a receiver: itself if it holds the shard, else holders take turns."""
    if shard in holders.get(receiver, ()):
        return receiver
    givers = [rank for rank, held in sorted(holders.items()) if shard in held]
    return givers[(receiver + shard) % len(givers)]
