"""Admission: when newcomers may join a world that is training, so that newcomers that fail cost the others little.

A newcomer that fails before its first commit has reset the others for nothing. One that the others cannot connect to holds them
up, for as long as ``form_timeout`` if its packets vanish. So newcomers may break only a few worlds in a row. After that all
newcomers wait for a pause, which doubles with each further failure, until a newcomer has made a commit.

A place (machine and executor) has to wait as soon as the other ranks could not connect to one of its newcomers. From all
suspected places together, only one newcomer at a time is let in: when several kept a world from forming, perhaps only one of
them was to blame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spark_elastic.driver.hosts import Place, doubled
from spark_elastic.driver.workers import Worker

# How many worlds in a row newcomers may break before all newcomers have to wait.
FREE_FAILURES = 3
SHORTEST_PAUSE = 15.0
LONGEST_PAUSE = 1800.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    opens_at: float = 0.0


@dataclass(slots=True)
class Admission:
    """Decides when newcomers are let in. ``now`` is the machine's time."""

    failures: int = 0
    _opens_at: float = 0.0
    _suspects: dict[Place, _Record] = field(default_factory=dict)

    def failed(self, now: float, cost: float) -> float:
        """Note that newcomers have broken a world, which has cost the others ``cost`` seconds.

        Return for how many seconds no newcomer at all is let in; 0 if the next one is welcome.
        """
        self.failures += 1
        if self.failures < FREE_FAILURES:
            return 0.0
        pause = _pause(self.failures - FREE_FAILURES, cost)
        self._opens_at = now + pause
        return pause

    def unconnected(self, place: Place, now: float, cost: float) -> float:
        """Note that nobody could connect to a newcomer of this place. Return for how long the place's newcomers are kept out."""
        record = self._suspects.setdefault(place, _Record())
        record.failures += 1
        pause = _pause(record.failures - 1, cost)
        record.opens_at = now + pause
        return pause

    def progressed(self, place: Place) -> None:
        """Note that a newcomer of this place has committed with the others. Called once for each worker."""
        self.failures = 0
        self._opens_at = 0.0
        self._suspects.pop(place, None)

    def opens_at(self, place: Place) -> float:
        """The time from which newcomers of this place are let in."""
        record = self._suspects.get(place)
        return self._opens_at if record is None else max(self._opens_at, record.opens_at)

    def admit(self, newcomers: Iterable[Worker], now: float) -> list[Worker]:
        """Choose which newcomers are let in now: from all suspected places together, only one."""
        welcome = [newcomer for newcomer in newcomers if self.opens_at(newcomer.place) <= now]
        suspects = [newcomer for newcomer in welcome if newcomer.place in self._suspects]
        suspects.sort(key=lambda newcomer: (self._suspects[newcomer.place].failures, newcomer.worker))
        return [newcomer for newcomer in welcome if newcomer not in suspects[1:]]


def _pause(doublings: int, cost: float) -> float:
    """Return a pause no shorter than what the failure has cost, so that the others do not spend most of their time waiting."""
    return doubled(max(SHORTEST_PAUSE, cost), doublings, LONGEST_PAUSE)
