"""HostManager: which hosts there are, and which have to cool down before they get another worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spark_elastic.protocol.messages import HostFacts

COOLDOWN_SECONDS = 0.5
COOLDOWN_LIMIT_SECONDS = 16.0
# After this many workers in a row have died without progress, the host is at fault, and it is not chance.
FAILURES_OF_A_BAD_HOST = 3


class Place(NamedTuple):
    """Where a worker runs, for the record of failures: Spark often restarts a task in the same place."""

    machine: str
    # The process id of the executor's JVM on that machine.
    executor: int

    @classmethod
    def of(cls, facts: HostFacts) -> Place:
        """Return the place that the task of a host has described."""
        return cls(facts.name, facts.executor_pid)

    @property
    def failure_domain(self) -> tuple[str, ...]:
        """Names what fails together, the executor. ``HostManager`` and ``Admission`` keep a record for each such domain.

        Failures, slowness and restarts are all judged by it. What is wider than an executor, such as a rack, needs a record of
        its own in ``HostManager``: one outage there fails many workers at once, which says nothing about each executor.
        """
        return (self.machine, str(self.executor))


@dataclass(slots=True)
class Host:
    """One registered task. ``worker`` is the number of the process that it runs, from the order to start it to its end."""

    host: int
    slot: int
    name: str
    place: Place
    address: str = ""
    worker: int | None = None
    # The host's worker is to leave and no other is started: Spark takes the host away or, if ``unlisted``, the discovery script
    # no longer lists it.
    draining: bool = False
    unlisted: bool = False
    released: bool = False
    # Spark is to start its task anew, perhaps elsewhere, once the end of its worker is known.
    at_fault: bool = False
    drain_deadline: float | None = None
    heard: float | None = None

    @property
    def is_vacant(self) -> bool:
        """Whether the host is to get a worker."""
        return self.worker is None and not self.draining and not self.at_fault


def doubled(pause: float, times: int, limit: float) -> float:
    """Return a pause that has been doubled so many times, which may be any number, or the limit if that is less."""
    return min(pause * 2.0 ** min(times, 16), limit)


@dataclass(slots=True)
class _Record:
    failures: int = 0
    # When the last failure that counts was, and until when the place cools down after it.
    failed_at: float = -math.inf
    ready_at: float = 0.0


@dataclass(slots=True)
class HostManager:
    """Keeps the registered hosts and the record of the places (machine and executor) that they run in.

    A place whose workers keep failing cools down: the first failure costs nothing, and each further one in a row twice the
    time of the one before. Workers that had already been started when another one failed belong to the same failure, as one
    incident ends all workers of an executor. The times are short, because Spark's executors come back. A worker that made
    progress before it died clears the record of its place. Records outlive hosts, because a restarted task often lands in the
    same place.
    """

    _hosts: dict[int, Host] = field(default_factory=dict)
    _records: dict[tuple[str, ...], _Record] = field(default_factory=dict)
    # Until when places get no worker because one was too slow there. Another worker's progress there does not end that.
    _slow_until: dict[tuple[str, ...], float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._hosts.values()))

    def __len__(self) -> int:
        return len(self._hosts)

    def get(self, host: int) -> Host | None:
        """Return a host by its number, or None."""
        return self._hosts.get(host)

    def add(self, host: Host) -> None:
        """Admit a host."""
        self._hosts[host.host] = host

    def remove(self, host: int) -> Host | None:
        """Forget a host and return it."""
        return self._hosts.pop(host, None)

    def draining(self) -> set[int]:
        """Return the numbers of the hosts that drain."""
        return {host.host for host in self._hosts.values() if host.draining}

    def worker_failed(self, place: Place, started_at: float, now: float) -> bool:
        """Note that a worker of this place died, started at this time. Return whether the place itself looks at fault."""
        record = self._records.setdefault(place.failure_domain, _Record())
        if started_at >= record.failed_at:
            record.failures += 1
            record.failed_at = now
            if record.failures > 1:
                record.ready_at = now + doubled(COOLDOWN_SECONDS, record.failures - 2, COOLDOWN_LIMIT_SECONDS)
        return record.failures >= FAILURES_OF_A_BAD_HOST

    def worker_progressed(self, place: Place) -> None:
        """Note that a worker of this place takes part in a world that commits. Called once in each world for every member."""
        self._records.pop(place.failure_domain, None)

    def worker_too_slow(self, place: Place, until: float) -> None:
        """Start no worker in this place before ``until``, because one was too slow there."""
        self._slow_until[place.failure_domain] = until

    def forgive_slow(self) -> None:
        """Let places have workers again in which one was too slow: a slow worker is better than none."""
        self._slow_until.clear()

    def ready_at(self, place: Place) -> float:
        """The time from which on the place may get a worker again; 0 for a place without a record."""
        record = self._records.get(place.failure_domain)
        slow_until = self._slow_until.get(place.failure_domain, 0.0)
        return slow_until if record is None else max(record.ready_at, slow_until)

    def startable(self, now: float) -> list[Host]:
        """Return the hosts without a worker that have cooled down, in the order in which they came."""
        return [host for host in self._hosts.values() if host.is_vacant and self.ready_at(host.place) <= now]

    def next_ready_at(self, now: float) -> float | None:
        """The earliest time at which a cooling host becomes startable."""
        times = [
            self.ready_at(host.place)
            for host in self._hosts.values()
            if host.is_vacant and self.ready_at(host.place) > now
        ]
        return min(times, default=None)
