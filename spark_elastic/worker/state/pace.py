"""Pace: at which commits ranks exchange values with each other.

An exchange is a collective of its own and costs more than all else at the commit of a small state. It cannot be left out by one
rank alone, because all have to enter it at the same commit. So each exchange says how many commits later the next one is, by rank
0's clock: at steps of a few milliseconds once in some commits, at steps of a tenth of a second and longer at every commit.

Without an exchange it is the reduction of gradients that keeps ranks together: whoever has its result knows that all others have
begun the same step, and so have made the commit before it. A commit that no such reduction precedes has an exchange.
"""

from __future__ import annotations

from collections.abc import Callable

# How many commits at the beginning of a generation all have an exchange, because most mistakes in user code show there.
FIRST = 16
# How many seconds lie between two exchanges, about, and how many commits at most, in case commits suddenly take longer.
SECONDS = 0.1
MOST = 8


class Pace:
    """Counts the commits of one generation on one rank. A look whether the world changes counts as a commit."""

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
        """Whether the present commit is the one that the last exchange has named."""
        return self._commits >= self._next

    def begin(self, steps_left: int) -> int:
        """Note an exchange at the present commit; return how many commits later the next one is, if this is rank 0.

        ``steps_left`` are those to the end of the epoch, whose rows are proved to be all there by an exchange at the end; 0 if
        that is not known.
        """
        now = self._clock()
        commits, seconds = self._commits - self._last, now - self._last_at
        self._last, self._last_at = self._commits, now
        self._next = self._commits + 1  # where this exchange is read, which may name a later one
        if self._commits <= self.first:
            return 1
        most = min(self.most, steps_left or self.most)
        return most if seconds * most <= self.seconds * commits else max(1, int(self.seconds * commits / seconds))

    def agree(self, commits: int) -> None:
        """Note how many commits lie between the last exchange and the next one, as rank 0 has said in it."""
        self._next = self._last + commits
