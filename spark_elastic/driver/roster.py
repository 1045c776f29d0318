"""Roster: the hosts and workers of a job, and what happens to them independently of worlds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from spark_elastic.driver import commands as do
from spark_elastic.driver.hosts import Host, HostManager, Place
from spark_elastic.driver.listing import HostListing
from spark_elastic.driver.phases import WorkerChange, WorkerPhase
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.records import HostDraining, HostListedAgain, HostRegistered, SlotsYielded, WorkerStarting


class Roster:
    """Keeps the hosts and workers of one job. Its methods change nothing else, and return what is to be done, in order.

    A roster knows nothing of worlds. Methods that take ``members``, the workers of the newest world, have the worker of a
    draining host leave at once, unless it is a member.
    """

    def __init__(self) -> None:
        self.hosts = HostManager()
        self.workers: dict[int, Worker] = {}
        # Where each worker was started, by its number. Entries of workers that are gone stay.
        self.places: list[Place] = []
        self._listing = HostListing()

    # ------------------------------------------------------------------ hosts

    def register(self, host: Host, members: Collection[int]) -> list[do.Command]:
        """Admit a host. It drains at once if the listing has no room for it."""
        self.hosts.add(host)
        registered = do.Record(HostRegistered(host.host, host.slot, host.name))
        return [registered, *self._follow_listing(members)]

    def take_listing(self, slots: Mapping[str, int | None], members: Collection[int]) -> list[do.Command]:
        """Follow a new listing: drain hosts that it has no room for, and use drained hosts again that it has room for."""
        self._listing.update(slots)
        return self._follow_listing(members)

    def _follow_listing(self, members: Collection[int]) -> list[do.Command]:
        drain, use = self._listing.plan(self.hosts)
        commands: list[do.Command] = []
        for host in drain:
            host.unlisted = True
            commands += self._drain(host, members)
        for host in use:
            host.unlisted = host.draining = False
            commands.append(do.Record(HostListedAgain(host.host, host.name)))
        return commands

    def take_away(self, number: int, deadline: float | None, members: Collection[int]) -> list[do.Command]:
        """Note that Spark takes a host away, at the deadline if Spark has given one."""
        host = self.hosts.get(number)
        if host is None or (host.draining and not host.unlisted):
            return []
        host.unlisted = False
        host.drain_deadline = deadline
        return self._drain(host, members)

    def _drain(self, host: Host, members: Collection[int]) -> list[do.Command]:
        """Give a host no further worker. A member leaves at the end of its world, which is decided elsewhere."""
        host.draining = True
        commands: list[do.Command] = [do.Record(HostDraining(host.host, host.name))]
        worker = self.workers.get(host.worker) if host.worker is not None else None
        if worker is not None and worker.phase is not WorkerPhase.DONE and worker.worker not in members:
            commands += self.dismiss([worker])
        return commands

    def release_drained(self) -> list[do.Command]:
        """Release tasks of hosts that Spark takes away, and may wait for. An unlisted host idles until it is listed again."""
        drained = [
            host
            for host in self.hosts
            if host.draining and not host.unlisted and not host.released and host.worker is None
        ]
        for host in drained:
            host.released = True
        return [do.ReleaseTask(host.host) for host in drained]

    def release_all(self) -> list[do.Command]:
        """Have all tasks end without an error."""
        return [do.ReleaseTask(host.host) for host in self.hosts]

    def yield_slots(self) -> list[do.Command]:
        """Give all hosts back to Spark, with the workers on them. Other hosts are requested later."""
        yielded = do.Record(SlotsYielded(len(self.hosts)))
        releases = self.release_all()
        for host in self.hosts:
            self.hosts.remove(host.host)
        self.workers.clear()
        return [yielded, do.YieldSlots(), *releases]

    # ------------------------------------------------------------------ workers

    def start_workers(self, now: float, limit: int | None) -> list[do.Command]:
        """Start a worker on each host that can have one, up to ``limit`` workers in all."""
        served = {worker.host for worker in self.workers.values() if worker.phase is WorkerPhase.DONE}
        commands: list[do.Command] = []
        for host in self.hosts.startable(now):
            if host.host in served:
                continue
            if limit is not None and len(self.workers) >= limit:
                break
            number = host.worker = len(self.places)
            self.places.append(host.place)
            self.workers[number] = Worker(
                number, host.host, host.name, host.place, started_at=now, heard=now, active_at=now
            )
            commands += [
                do.StartWorker(host.host, number),
                do.Record(WorkerStarting(number, host.host, host.name)),
            ]
        return commands

    def progressed(self, workers: Iterable[int]) -> None:
        """Clear the records of the places of workers that took part in a world that commits, even if the workers are gone."""
        for number in workers:
            self.hosts.worker_progressed(self.places[number])

    def dismiss(self, workers: Iterable[Worker]) -> list[do.Command]:
        """Have workers end by themselves. Workers that have not connected yet cannot be told to, so they are killed."""
        commands: list[do.Command] = []
        for worker in workers:
            is_connected = worker.phase is not WorkerPhase.STARTING
            worker.enter(WorkerChange.DISMISSED)
            commands.append(do.LeaveJob(worker.worker) if is_connected else do.KillWorker(worker.host, worker.worker))
        return commands

    def kill(self, workers: Iterable[Worker]) -> list[do.Command]:
        """Have workers end at once, and forget those that have delivered a result."""
        commands: list[do.Command] = []
        for worker in workers:
            if worker.phase is WorkerPhase.DONE:
                del self.workers[worker.worker]
            else:
                worker.enter(WorkerChange.DISMISSED)
                commands.append(do.KillWorker(worker.host, worker.worker))
        return commands

    def remove(self, worker: Worker) -> list[do.Command]:
        """Forget a worker that is lost. Its process is killed, unless it is known to have ended."""
        del self.workers[worker.worker]
        host = self.hosts.get(worker.host)
        if host is None or host.worker == worker.worker:
            return [do.KillWorker(worker.host, worker.worker)]
        return []

    def blame_place(self, worker: Worker, now: float, *, is_member: bool) -> float:
        """Count a lost worker against the place where it ran. After too many, the host is at fault, unless this was a member.

        Return for how many seconds the place gets no worker because of this loss.
        """
        before = max(now, self.hosts.ready_at(worker.place))
        is_bad = self.hosts.worker_failed(worker.place, worker.started_at, now)
        host = self.hosts.get(worker.host)
        if is_bad and host is not None and not is_member:
            host.at_fault = True
        ready_at = self.hosts.ready_at(worker.place)
        return ready_at - now if ready_at > before else 0.0

    def exited(self, number: int, on: int) -> bool:
        """Note the end of a worker's process. Return whether it was expected, after an order to end or a result."""
        host = self.hosts.get(on)
        if host is not None and host.worker == number:
            host.worker = None
        worker = self.workers.get(number)
        if worker is not None and worker.phase is WorkerPhase.LEAVING:
            del self.workers[number]
        return worker is not None and worker.phase in (WorkerPhase.LEAVING, WorkerPhase.DONE)
