"""Pace: at which commits ranks exchange values with each other.

An exchange is a collective of its own, and costs more than everything else in the commit of a small state. All ranks have to
enter it at the same commit, so no rank can skip it alone. Therefore each exchange says how many commits later the next one is,
by rank 0's clock: with steps of a few milliseconds after several commits, with steps of a tenth of a second or longer at every
commit.

Between exchanges, the reduction of gradients keeps ranks together: a rank that has its result knows that all others have begun
the same step, and so have made the commit before it. A commit without such a reduction before it has an exchange.
"""

from __future__ import annotations

from collections.abc import Callable

# The first commits of a generation that all have an exchange, because most mistakes in user code show there.
FIRST = 16
# The approximate seconds between two exchanges, and the most commits, in case commits suddenly take longer.
SECONDS = 0.1
MOST = 8


class Pace:
    """Counts the commits of one generation on one rank. A check whether the world changes counts as a commit."""

    first, seconds, most = FIRST, SECONDS, MOST

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._commits = 0
        # The commit of the last exchange and its time, and the commit at which the next one is due.
        self._last, self._last_at = 0, clock()
        self._next = 1

    def count(self) -> None:
        """Note a commit."""
        self._commits += 1

    def is_due(self) -> bool:
        """Whether the next exchange is due at the present commit."""
        return self._commits >= self._next

    def begin(self, steps_left: int) -> int:
        """Note an exchange at the present commit; return how many commits later the next one is, if this is rank 0.

        ``steps_left`` are those to the end of the epoch, where an exchange proves that all rows were delivered; 0 if not known.
        """
        now = self._clock()
        commits, seconds = self._commits - self._last, now - self._last_at
        self._last, self._last_at = self._commits, now
        self._next = self._commits + 1  # here this exchange is read, which may name a later commit
        if self._commits <= self.first:
            return 1
        most = min(self.most, steps_left or self.most)
        return most if seconds * most <= self.seconds * commits else max(1, int(self.seconds * commits / seconds))

    def agree(self, commits: int) -> None:
        """Note how many commits lie between the last exchange and the next one, as rank 0 has said in it."""
        self._next = self._last + commits
