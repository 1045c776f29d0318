"""Gathering: how hosts and workers come together before a world forms, as the event log tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_elastic.protocol import records
from spark_elastic.protocol.records import Record


@dataclass(slots=True)
class Gathering:
    """Follows how hosts and workers come together: which have arrived, are being started, run, and are ready."""

    hosts: set[int] = field(default_factory=set)
    starting: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)

    def see(self, record: Record) -> None:
        """Take a record into account."""
        match record:
            case records.HostRegistered(host):
                self.hosts.add(host)
            case records.HostLost(host):
                self.hosts.discard(host)
            case records.WorkerStarting(worker):
                self.starting.add(worker)
            case records.WorkerStarted(worker):
                self._move(worker, self.running)
            case records.WorkerReady(worker):
                self._move(worker, self.ready)
            case records.WorkerLost(worker):
                self._move(worker, None)

    def awaited(self, size: int) -> str:
        """Say what a world of ``size`` workers waits for; an empty string if nothing is known."""
        counts = (
            (size - len(self.hosts), "waits for a slot", "wait for slots"),
            (len(self.starting), "imports torch", "import torch"),
            (len(self.running), "runs the function's first lines", "run the function's first lines"),
        )
        return ", ".join(f"{count} {one if count == 1 else more}" for count, one, more in counts if count > 0)

    def _move(self, worker: int, to: set[int] | None) -> None:
        for workers in (self.starting, self.running, self.ready):
            workers.discard(worker)
        if to is not None:
            to.add(worker)
