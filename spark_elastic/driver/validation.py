"""Invariants of a ``JobState`` between two events. Tests and the simulation check them after every event."""

from __future__ import annotations

from spark_elastic.driver.generation import Generation
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.workers import Worker

# The phases of workers that the machine counts on for this world or the next.
COUNTED = (WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.VOTED)
IN_A_WORLD = (WorkerPhase.MEMBER, WorkerPhase.VOTED)


def validate(job: JobState) -> None:
    """Raise ``AssertionError`` if an invariant is violated. Takes time in proportion to the number of workers."""
    if job.over:
        return  # what remains of a job that has ended need not be consistent
    assert list(job.sizes) == list(range(1, job.generation + 1)), "generations are numbered one after the other"
    if job.world is not None:
        _validate_world(job.world, job)
    settings, limit = job.settings, job.sizing.limit
    if limit is not None:
        assert settings.adaptive_np, "fewer workers train only where that was asked for"
        assert settings.min_np <= limit < settings.max_np, (
            "fewer workers are at least min_np, and fewer than there may be"
        )
    for host in job.hosts:
        served = job.workers.get(host.worker) if host.worker is not None else None
        assert served is None or served.host == host.host, f"the worker of host {host.host} knows where it runs"
        assert host.draining or not host.released, f"host {host.host} is released only when it drains"
    for number, worker in job.workers.items():
        assert number == worker.worker < len(job.roster.places), f"worker {number} has a number of its own"
        _validate_worker(worker, job)


def _validate_world(world: Generation, job: JobState) -> None:
    members = set(world.ranks)
    size, phase = len(members), world.phase
    assert world.generation == job.generation, "the world is the newest one"
    assert list(world.ranks.values()) == list(range(size)), "ranks are dense, and each is one worker's"
    assert len(world.members) == size == job.sizes[world.generation]
    assert job.settings.min_np <= size <= job.settings.max_np
    assert phase is not WorldPhase.OVER, "a world that is over has been replaced or dropped"
    for name in ("acknowledged", "answered", "holding", "raised", "blamed"):
        assert getattr(world, name) <= members, f"{name}: all are members"
    assert world.holding <= world.answered
    if phase in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING, WorldPhase.FINISHING):
        assert world.was_formed, f"a world that is {phase.name} has formed"
    assert world.acknowledged == members or not world.was_formed, "a world has formed when all have acknowledged"
    assert not world.to_abort or phase is WorldPhase.BREAKING, "nobody is called back from a world that goes on"
    assert bool(world.broken_by) == (phase is WorldPhase.BREAKING), "why a world breaks is known, and of no other"


def _validate_worker(worker: Worker, job: JobState) -> None:
    who, phase = f"worker {worker.worker}", worker.phase
    assert phase not in IN_A_WORLD or job.is_member(worker.worker), f"{who} is {phase.name} of the newest world"
    assert worker.awaited_since is None or phase in (*IN_A_WORLD, WorkerPhase.LEAVING), f"{who} is awaited from a world"
    if phase in COUNTED:
        newest = job.newest_commit
        assert worker.commit is None or (newest is not None and worker.commit <= newest), f"{who} has no newer commit"
    if phase not in (WorkerPhase.LEAVING, WorkerPhase.DONE):
        host = job.hosts.get(worker.host)
        assert host is not None, f"the host of {who} is registered"
        assert host.worker == worker.worker, f"the host of {who} knows whom it runs"
