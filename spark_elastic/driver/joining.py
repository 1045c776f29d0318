"""When to interrupt a running world: for newcomers, for a draining host, or so that fewer workers train."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spark_elastic.driver.admission import Admission
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.situation import Situation


class InterruptCause(Enum):
    """The kinds of interrupts, by their names in the event log."""

    JOIN = "join"
    DRAIN = "drain"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The running world is to end at its next commit. ``reason`` is for people."""

    cause: InterruptCause
    reason: str


def joins_at(seen: Situation, admission: Admission) -> float | None:
    """Return when the running world is to be interrupted for the newcomers that are ready; None if not at all.

    Newcomers are collected until none has come for ``join_window`` and no other worker is booting, but never for longer than
    ``join_patience``.
    """
    newcomers = seen.newcomers
    if seen.world is None or seen.world.phase is not WorldPhase.RUNNING or not newcomers:
        return None
    members = seen.members
    if len(members) >= seen.most or any(worker.phase is WorkerPhase.VOTED for worker in members):
        return None
    since = [max(worker.ready_at, admission.opens_at(worker.place)) for worker in newcomers]
    latest = min(since) + seen.settings.join_patience
    if any(worker.phase in (WorkerPhase.STARTING, WorkerPhase.BOOTING) for worker in seen.workers.values()):
        return latest
    return min(latest, max(time for time in since if time <= latest) + seen.settings.join_window)


def find_interrupt(seen: Situation, admission: Admission) -> Interrupt | None:
    """Say why the running world is to end at its next commit; None if it is to continue."""
    if seen.world is None or seen.world.phase is not WorldPhase.RUNNING or not seen.settings.elastic:
        return None
    members = seen.members
    if any(worker.phase is WorkerPhase.VOTED for worker in members):
        return None
    draining = seen.hosts.draining()
    staying = [worker for worker in members if worker.host not in draining]
    if len(staying) < len(members) and (staying or seen.newcomers):
        return Interrupt(InterruptCause.DRAIN, "a host drains")
    if len(members) > seen.most:
        return Interrupt(InterruptCause.SHRINK, f"{seen.most} workers are to train")
    due = joins_at(seen, admission)
    return Interrupt(InterruptCause.JOIN, "workers arrived") if due is not None and seen.now >= due else None
