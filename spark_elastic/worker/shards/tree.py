"""The tree in which the values of V shards are added: the sum is associated alike, whichever rank computes which shard.

The tree is binary: every node is a range of shards, cut in the middle. If V is divisible by 3, the whole is cut at two thirds, so
that thirds are nodes, too. V = 24 is then spread evenly over 1, 2, 3, 4, 6 and 8 ranks, each of which adds its shards up
to two nodes at most. A sum in the tree is as precise as any other; sums of integers, which have no order, cost several times as
much and lose digits. Pure: nothing here knows what is added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum over the shards [start, stop)."""

    start: int
    stop: int


def halves(node: Node, shards: int) -> tuple[Node, Node] | None:
    """Return the two nodes that this node is the sum of; None for a single shard."""
    start, stop = node
    if stop - start == 1:
        return None
    middle = 2 * shards // 3 if node == (0, shards) and shards % 3 == 0 else (start + stop + 1) // 2
    return Node(start, middle), Node(middle, stop)


def nodes_of(shards: int, mine: range) -> tuple[Node, ...]:
    """Return the largest nodes whose shards are all ``mine``, those of one rank, in order. Only these leave the rank."""

    def cover(node: Node) -> Iterator[Node]:
        if mine.start <= node.start and node.stop <= mine.stop:
            yield node
        elif node.start < mine.stop and mine.start < node.stop:
            for half in halves(node, shards) or ():
                yield from cover(half)

    return tuple(cover(Node(0, shards)))


def total(shards: int, have: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Add up nodes that cover all shards, in the order of the tree."""

    def value(node: Node) -> T:
        if node in have:
            return have[node]
        both = halves(node, shards)
        assert both is not None, f"{node} of {shards} shards is missing"
        return add(value(both[0]), value(both[1]))

    return value(Node(0, shards))


@functools.cache
def _parents(shards: int) -> Mapping[tuple[Node, Node], Node]:
    """Return the node that each pair of halves adds up to."""
    found = {}
    waiting = [Node(0, shards)]
    while waiting:
        node = waiting.pop()
        if (both := halves(node, shards)) is not None:
            found[both] = node
            waiting += both
    return found


class RunningSum(Generic[T]):
    """Adds the values of consecutive shards as they arrive, and holds as few of them as the order of the tree allows."""

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._kept: list[tuple[Node, T]] = []
        self._parents = _parents(shards)

    @property
    def depth(self) -> int:
        """How many values are kept at present."""
        return len(self._kept)

    def push(self, shard: int, value: T) -> None:
        """Add the value of the next shard."""
        self._kept.append((Node(shard, shard + 1), value))
        while len(self._kept) > 1 and (parent := self._parents.get((self._kept[-2][0], self._kept[-1][0]))) is not None:
            (_, right), (_, left) = self._kept.pop(), self._kept.pop()
            self._kept.append((parent, self._add(left, right)))

    @property
    def nodes(self) -> dict[Node, T]:
        """The completed nodes that belong to no larger completed node."""
        return dict(self._kept)
