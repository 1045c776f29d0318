"""HostManager: the registered hosts, and which of them have to cool down before they get another worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spark_elastic.protocol.messages import HostFacts

COOLDOWN_SECONDS = 0.5
COOLDOWN_LIMIT_SECONDS = 16.0
# Once this many workers in a row have died without progress, the host is taken to be at fault.
FAILURES_OF_A_BAD_HOST = 3


class Place(NamedTuple):
    """What fails as a unit: an executor. Spark often restarts a task in the same place, so records of failures go by places.

    A wider unit, such as a rack, is a field here with a default, and has a table of its own in ``HostManager``, by that field: an
    outage there fails many workers at once, which says nothing about each executor.
    """

    machine: str
    # The process id of the executor's JVM on that machine.
    executor: int

    @classmethod
    def of(cls, facts: HostFacts) -> Place:
        """Return the place that a host's task has described."""
        return cls(facts.name, facts.executor_pid)


@dataclass(slots=True)
class Host:
    """One registered task, not a machine: several may be on one, which is ``place.machine``.

    ``worker`` is the number of its worker, from the order to start the process until its end.
    """

    host: int
    slot: int
    name: str
    place: Place
    address: str = ""
    worker: int | None = None
    # The host's worker is to leave and no other is started: Spark takes the host away or, if ``unlisted``, the discovery script
    # no longer lists the host.
    draining: bool = False
    unlisted: bool = False
    released: bool = False
    # Spark is to start the host's task again, perhaps elsewhere, once the end of its worker is known.
    at_fault: bool = False
    drain_deadline: float | None = None
    heard: float | None = None

    @property
    def is_vacant(self) -> bool:
        """Whether the host is to get a worker."""
        return self.worker is None and not self.draining and not self.at_fault


def doubled(pause: float, times: int, limit: float) -> float:
    """Return ``pause`` doubled ``times`` times, at most ``limit``. No number of times overflows."""
    return min(pause * 2.0 ** min(times, 16), limit)


@dataclass(slots=True)
class _Record:
    failures: int = 0
    # The time of the last failure that counts, and until when the place cools down after it.
    failed_at: float = -math.inf
    ready_at: float = 0.0


@dataclass(slots=True)
class HostManager:
    """Keeps the registered hosts and the record of the places (machine and executor) that they run in.

    A place whose workers keep failing cools down: the first failure costs nothing, and each further failure in a row costs
    twice the time of the one before. Workers that had already been started when another one failed belong to the same failure,
    because one incident ends all workers of an executor. The times are short, because Spark's executors come back. A worker
    that made progress before it died clears the record of its place. Records outlive hosts, because a restarted task often
    lands in the same place.
    """

    _hosts: dict[int, Host] = field(default_factory=dict)
    _records: dict[Place, _Record] = field(default_factory=dict)
    # Until when places get no worker because one was too slow there. Another worker's progress does not lift this.
    _slow_until: dict[Place, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._hosts.values()))

    def __len__(self) -> int:
        return len(self._hosts)

    def get(self, host: int) -> Host | None:
        """Return the host with this number, or None."""
        return self._hosts.get(host)

    def add(self, host: Host) -> None:
        """Admit a host."""
        self._hosts[host.host] = host

    def remove(self, host: int) -> Host | None:
        """Forget a host and return it."""
        return self._hosts.pop(host, None)

    def draining(self) -> set[int]:
        """Return the numbers of the draining hosts."""
        return {host.host for host in self._hosts.values() if host.draining}

    def worker_failed(self, place: Place, started_at: float, now: float) -> bool:
        """Note that a worker of this place, started at ``started_at``, died. Return whether the place itself looks at fault."""
        record = self._records.setdefault(place, _Record())
        if started_at >= record.failed_at:
            record.failures += 1
            record.failed_at = now
            if record.failures > 1:
                record.ready_at = now + doubled(COOLDOWN_SECONDS, record.failures - 2, COOLDOWN_LIMIT_SECONDS)
        return record.failures >= FAILURES_OF_A_BAD_HOST

    def worker_progressed(self, place: Place) -> None:
        """Note that a worker of this place takes part in a world that commits. Called once per world for every member."""
        self._records.pop(place, None)

    def worker_too_slow(self, place: Place, until: float) -> None:
        """Start no worker in this place before ``until``, because one was too slow there."""
        self._slow_until[place] = until

    def forgive_if_short(self, needed: int, now: float) -> None:
        """Let places where a worker was too slow have workers again if fewer than ``needed`` hosts have one or will get one.

        A slow worker is better than none.
        """
        if not self._slow_until:
            return  # this is asked after every event
        usable = [
            host
            for host in self._hosts.values()
            if not host.draining
            and (host.worker is not None or (host.is_vacant and self._slow_until.get(host.place, 0.0) <= now))
        ]
        if len(usable) < needed:
            self._slow_until.clear()

    def ready_at(self, place: Place) -> float:
        """The time from which the place may get a worker again; 0 for a place without a record."""
        record = self._records.get(place)
        slow_until = self._slow_until.get(place, 0.0)
        return slow_until if record is None else max(record.ready_at, slow_until)

    def startable(self, now: float) -> list[Host]:
        """Return the hosts without a worker that have cooled down, in the order in which they came."""
        return [host for host in self._hosts.values() if host.is_vacant and self.ready_at(host.place) <= now]

    def next_ready_at(self, now: float) -> float | None:
        """The earliest time at which a host that cools down becomes startable."""
        times = [
            self.ready_at(host.place)
            for host in self._hosts.values()
            if host.is_vacant and self.ready_at(host.place) > now
        ]
        return min(times, default=None)
