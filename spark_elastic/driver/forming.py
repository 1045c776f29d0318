"""Forming: which workers are in the next world, and which are replaced when the ranks of a world have not connected.

In a full mesh, one unreachable rank keeps all others from connecting, and nothing tells which rank it is. So the blame falls on
workers that have never been in a world that formed; among equals, on the one that has failed most often, then on the youngest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spark_elastic.driver.admission import Admission
from spark_elastic.driver.holders import newest_held
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.ranks import choose_members
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import CommitId

# After this many failures in a row to connect, ranks are replaced, one after the other.
FORM_ATTEMPTS = 3


def is_gathered(seen: Situation) -> bool:
    """Whether the next world may form: there is none now, or the present one is ending and all that is left of it is ready."""
    if seen.world is None:
        return True
    if seen.world.phase not in (WorldPhase.INTERRUPTING, WorldPhase.BREAKING):
        return False
    return all(worker.phase is WorkerPhase.READY for worker in seen.members)


def newest_commit(seen: Situation) -> CommitId | None:
    """Return the newest commit that the ready workers hold, one alone or several together; None if they hold none."""
    return newest_held(_ready(seen))


def choose_next(seen: Situation, admission: Admission, newest: CommitId | None) -> list[Worker]:
    """Choose the workers of the next world: fewer than ``seen.needed`` if there are not enough.

    Newcomers that have to wait are taken only if there are too few workers without them.
    """
    ready = _ready(seen)
    draining = seen.hosts.draining()
    leaving = {worker.worker for worker in ready if worker.host in draining}
    # Members of a broken world that had not received the state yet are still newcomers.
    newcomers = [] if newest is None else [w for w in ready if w.commit is None and not w.has_progressed]
    admitted = admission.admit(newcomers, seen.now)
    kept_out = [worker for worker in newcomers if worker not in admitted]
    welcome = [worker for worker in ready if worker not in kept_out]
    chosen = choose_members(welcome, seen.most, newest, leaving)
    if kept_out and len(chosen) < seen.needed:
        chosen = choose_members(ready, seen.most, newest, leaving)
    return chosen


def find_drained(seen: Situation, kept: Collection[int]) -> list[Worker]:
    """Find the ready workers whose host drains and that are not in ``kept``."""
    return [worker for worker in _ready(seen) if seen.is_draining(worker) and worker.worker not in kept]


def find_left_out(seen: Situation, kept: Collection[int]) -> list[Worker]:
    """Find the ready workers that were in an earlier world and are not in ``kept``: the present world is smaller.

    Once the others have committed, such a worker holds an outdated commit, from which no world must ever continue.
    """
    return [worker for worker in _ready(seen) if worker.commit is not None and worker.worker not in kept]


def is_sealed(seen: Situation) -> bool:
    """Whether all members of a running world hold its state. Until they do, a drained worker may be the only one that does."""
    world = seen.world
    if world is None or world.phase not in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING):
        return False
    commits = [worker.commit for worker in seen.members]
    return all(commit is not None and commit.generation == world.generation for commit in commits)


def _ready(seen: Situation) -> list[Worker]:
    return [worker for worker in seen.workers.values() if worker.phase is WorkerPhase.READY]


def choose_replaced(members: Iterable[Worker], missing: Iterable[Worker], took_long: bool) -> list[Worker]:
    """Choose whom to replace of the ``missing``, who have not connected; ``members`` are all that are left of the world.

    If any member has been connected before, missing newcomers are replaced first, all of them, and at once if the others have
    stood still for long. Nobody else is replaced while a newcomer is missing. The last holder of the newest commit is never
    chosen.
    """
    members, missing = list(members), list(missing)
    newcomers = [worker for worker in missing if not worker.has_connected]
    if newcomers and any(worker.has_connected for worker in members):
        return [worker for worker in newcomers if took_long or worker.form_failures >= FORM_ATTEMPTS]
    newest = max((worker.commit for worker in members if worker.commit is not None), default=None)
    holders = [] if newest is None else [worker for worker in members if worker.commit == newest]
    suspects = [
        worker
        for worker in missing
        if worker.form_failures >= FORM_ATTEMPTS and (len(holders) > 1 or worker not in holders)
    ]
    suspects.sort(key=lambda worker: (worker in holders, -worker.form_failures, -worker.worker))
    return suspects[:1]
