"""What each event of a host, or of the list of usable hosts, means for the job: one function per event."""

from __future__ import annotations

from spark_elastic.driver import events as ev
from spark_elastic.driver.hosts import Host
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.losses import lose_worker
from spark_elastic.protocol.records import HostLost, SlotGivenUp


def task_registered(job: JobState, event: ev.TaskRegistered) -> None:
    """A host has arrived, and is to get a worker."""
    host = Host(event.host, event.slot, event.name, event.place, event.address)
    job.order(*job.roster.register(host, job.ranks))


def task_heard(job: JobState, event: ev.TaskHeard) -> None:
    """A host's task has sent a message."""
    host = job.hosts.get(event.host)
    if host is not None:
        host.heard = job.now


def task_lost(job: JobState, event: ev.TaskLost) -> None:
    """A host is gone, and its worker with it: the task that has ended was the worker's supervisor."""
    host = job.hosts.remove(event.host)
    if host is None:
        return
    cause = f"its host was lost: {event.reason}"
    if host.worker is not None:
        # Its connection may have broken a moment before, and nobody is left to tell of its exit.
        job.book.explain(host.worker, cause, ())
    if job.over:
        return
    job.record(HostLost(event.host, host.name, event.reason))
    if host.worker is not None:
        lose_worker(job, host.worker, cause)


def slot_given_up(job: JobState, event: ev.SlotGivenUp) -> None:
    """Spark no longer starts the task of a slot, which may explain a shortage of hosts."""
    job.shortage.slot_given_up(event.reason)
    job.record(SlotGivenUp(event.slot, event.reason))


def host_draining(job: JobState, event: ev.HostDraining) -> None:
    """Spark takes a host away."""
    deadline = None if event.deadline is None else job.clock.from_driver_time(event.deadline)
    job.order(*job.roster.take_away(event.host, deadline, job.ranks))


def hosts_listed(job: JobState, event: ev.HostsListed) -> None:
    """The discovery script's list of machines has changed."""
    job.order(*job.roster.take_listing(event.slots, job.ranks))
