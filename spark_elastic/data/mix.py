"""Determines which of several datasets each row of an epoch comes from: a pure function of the weights, seed and epoch.

Ticket t of an epoch (see ``order``) is a row of one dataset. After every 1,024 tickets, each dataset has had its proportion, as
nearly as whole rows allow: the first dataset is split off from all others, the second from those after it, each by integer
arithmetic. So the position t alone determines the position in each dataset. Within these blocks, the datasets come in random
order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

_BLOCK = 1024


def rows_of_epoch(weights: Sequence[float], rows: Sequence[int]) -> tuple[int, ...]:
    """Return how many rows of each dataset an epoch has, in the proportions of ``weights``, which add up to 1.

    An epoch is as long as it can be without repeating a row: up to rounding, it has all ``rows`` of one dataset.
    """
    total = int(min(count / weight for count, weight in zip(rows, weights, strict=True)) + 1e-6)
    while True:
        exact = np.asarray(weights, np.float64) * total
        shares = np.floor(exact).astype(np.int64)
        missing = total - int(shares.sum())
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
        if all(shares <= np.asarray(rows)):
            return tuple(shares.tolist())
        total -= 1


class MixOrder:
    """Assigns the tickets of one epoch to datasets. counts: how many tickets each dataset has."""

    def __init__(self, counts: Sequence[int], seed: int, epoch: int) -> None:
        self.counts = tuple(counts)
        self.total = sum(counts)
        self.epoch = epoch
        self._seed = seed
        self._labels = functools.lru_cache(maxsize=8)(self._shuffled)

    def given(self, tickets: int) -> np.ndarray:
        """Return how many of the first ``tickets`` tickets belong to each dataset: int64 [datasets]."""
        block, rest = divmod(tickets, _BLOCK)
        result: np.ndarray = self._before(block)
        if rest:
            result = result + np.bincount(self._labels(block)[:rest], minlength=len(self.counts))
        return result

    def datasets(self, start: int, stop: int) -> np.ndarray:
        """Return the dataset of each ticket in [start, stop): int64."""
        first, last = start // _BLOCK, -(-stop // _BLOCK)
        labels = [self._labels(block) for block in range(first, last)]
        found: np.ndarray = np.concatenate([np.zeros(0, np.int64), *labels])[start - first * _BLOCK :][: stop - start]
        return found

    def _before(self, block: int) -> np.ndarray:
        """Return how many tickets in the blocks before this one belong to each dataset."""
        tickets, left = min(block * _BLOCK, self.total), self.total
        given = []
        for count in self.counts:
            of_this = tickets * count // left if left else 0
            given.append(of_this)
            tickets, left = tickets - of_this, left - count
        return np.array(given, np.int64)

    def _shuffled(self, block: int) -> np.ndarray:
        labels = np.repeat(np.arange(len(self.counts)), self._before(block + 1) - self._before(block))
        return np.random.default_rng(np.random.SeedSequence([self._seed, self.epoch, block])).permutation(labels)
