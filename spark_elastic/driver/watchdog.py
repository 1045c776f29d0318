"""The machine's watchdog: which hosts and workers have been silent, stuck or away for too long.

Each check is a pure function of a ``Situation``. The machine acts on what one check finds before it makes the next. Times are
those of the machine's clock, which stands still while the driver is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from spark_elastic.driver.generation import Generation
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import COMMIT

# After how many seconds of silence what is known of a worker counts as out of date.
HEARD_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class HostSilent:
    """A host has to be given up, because its task has been silent."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker has to be replaced, because it makes no progress."""

    worker: int
    cause: str


@dataclass(frozen=True, slots=True)
class RanksUnconnected:
    """Some ranks have not connected to the others: the world breaks, and the workers that are to blame are replaced."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorldStuck:
    """The world breaks, and no worker is to blame."""

    reason: str


@dataclass(frozen=True, slots=True)
class CollectivesStuck:
    """Ranks wait and none makes progress: the world breaks. The connections of ``silent`` workers did not answer.

    ``all_wait``: all ranks wait for each other. Otherwise some compute, and others may be waiting for them.
    ``collectives_differ``: ranks wait in different collectives, which no network failure explains.
    """

    reason: str
    silent: tuple[int, ...]
    all_wait: bool
    collectives_differ: bool


@dataclass(frozen=True, slots=True)
class Pointless:
    """The job fails: the user's code has a mistake that no reset can repair."""

    reason: str


@dataclass(frozen=True, slots=True)
class RanksDiffer:
    """The job fails: not all ranks train the same parameters."""

    reason: str


Finding = HostSilent | WorkerHung | RanksUnconnected | WorldStuck | CollectivesStuck | Pointless | RanksDiffer


def silent_hosts(seen: Situation) -> Iterator[Finding]:
    """Find hosts whose task has not been heard from for too long."""
    limit = seen.settings.heartbeat_timeout
    silent = {
        host.host: seen.now - host.heard
        for host in seen.hosts
        if host.heard is not None and seen.now - host.heard > limit
    }
    needed = last_holders(seen, {worker.worker for worker in seen.workers.values() if worker.host in silent})
    holding = {worker.host for worker in seen.workers.values() if worker.worker in needed}
    for host, seconds in silent.items():
        patience = _patience(seen, limit, host in holding)
        if seconds > patience:
            yield HostSilent(host, f"it did not answer pings for {patience:g} s")


def silent_workers(seen: Situation) -> Iterator[Finding]:
    """Find workers whose process is stopped or did not start. Other checks judge whether a process makes progress."""
    settings = seen.settings
    # Half of the time in which a world has to form, so that the other half is left for a replacement.
    to_start = min(settings.start_timeout, settings.elastic_timeout) / 2
    limit = settings.heartbeat_timeout
    needed = last_holders(seen, {worker.worker for worker in seen.workers.values() if seen.now - worker.heard > limit})
    for worker in seen.workers.values():
        is_starting = worker.phase is WorkerPhase.STARTING
        patience = to_start if is_starting else _patience(seen, limit, worker.worker in needed)
        if worker.phase is not WorkerPhase.DONE and seen.now - worker.heard > patience:
            what = "did not start" if is_starting else "its process was silent"
            yield WorkerHung(worker.worker, f"hung: {what} for {patience:g} s")


def differing_ranks(seen: Situation) -> Iterator[Finding]:
    """Find a change of the trained parameters that some ranks have made and others have not.

    This does not depend on time: all ranks enter the same collectives in the same order. So a rank that has entered as many of
    them as there were up to the comparison of a change, but has made fewer changes, has entered another collective in its
    place.
    """
    world = seen.world
    if world is None or world.phase not in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING):
        return
    for worker in seen.members:
        mine = worker.activity
        others = [
            world.ranks[other.worker]
            for other in seen.members
            if other.activity.changes < mine.changes and other.activity.collectives >= mine.compared_in
        ]
        if others:
            changed = [world.ranks[other.worker] for other in seen.members if other.activity.changes >= mine.changes]
            yield RanksDiffer(
                f"{mine.change} on ranks {changed} only, of {len(world.members)}: ranks {others} went on without that. Change "
                "requires_grad and modules on all ranks at the same step, and where the elastic function is entered again, "
                "from what the State says"
            )
            return


def stuck_collectives(seen: Situation) -> Iterator[Finding]:
    """Find ranks that have not entered a collective in which others wait, and worlds in which all wait for each other."""
    world = seen.world
    if world is None or world.phase not in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING):
        return
    if not seen.settings.elastic:
        yield from _missed_in_fixed_world(seen, world)
        return
    limit = _time_without_progress(seen, world)
    if any(seen.now - worker.active_at <= limit for worker in seen.members):
        return
    if not all(_is_heard(seen, worker) for worker in seen.members):
        return  # it is not known what a silent rank has entered, and another check judges silence
    inside = [worker for worker in seen.members if worker.phase is WorkerPhase.MEMBER]
    outside = [worker for worker in seen.members if worker.phase is not WorkerPhase.MEMBER]
    if not inside:
        return
    fewest = min(worker.activity.collectives for worker in inside)
    missed = [world.ranks[worker.worker] for worker in outside if worker.activity.collectives < fewest]
    is_awaited = len(inside) < len(world.members)  # lost ranks had left the world before they were lost
    late = find_late(inside, is_awaited)
    if missed and world.phase is WorldPhase.INTERRUPTING:
        yield WorldStuck(f"ranks {missed} left the world at another commit than the others")
    elif missed:
        yield Pointless(
            f"ranks {missed} returned from the elastic function while others waited for them in a collective for "
            f"{limit:g} s; all ranks have to take the same steps"
        )
    elif any(_lacks_state(worker, world) for worker in inside if worker not in late or _speaks(seen, worker)):
        # Some ranks are not in the user's function yet: the rank that should send them the state does not, and will not.
        yield WorldStuck(f"not all ranks had the state within {limit:g} s")
    elif late:
        yield from _replace_late(seen, world, late, limit)
    elif any(worker.activity.waiting for worker in inside):
        yield _find_stuck(seen, world, inside, limit)
    elif not any(worker.has_progressed for worker in inside):
        # A rank that has committed before may be in the same long code as at the last loss.
        yield Pointless(
            f"no worker reached a commit within {limit:g} s (twice hang_timeout={seen.settings.hang_timeout:g}) "
            f"after generation {world.generation} had formed: the elastic function has to call state.commit(), "
            "and state.heartbeat() in long code before it"
        )


def _replace_late(seen: Situation, world: Generation, late: Sequence[Worker], limit: float) -> Iterator[Finding]:
    numbers = {worker.worker for worker in late}
    if len(seen.members) < len(world.members) or last_holders(seen, numbers):
        # Such a rank may itself wait for ranks that left and were then lost. An abort frees it, so no worker is given up.
        yield WorldStuck(f"ranks {[world.ranks[number] for number in sorted(numbers)]} were waited for {limit:g} s")
        return
    for worker in late:
        yield WorkerHung(
            worker.worker,
            f"hung: all others had waited for it in a collective for {limit:g} s "
            "(hang_timeout; call state.heartbeat() in long code)",
        )


def _missed_in_fixed_world(seen: Situation, world: Generation) -> Iterator[Finding]:
    """Find ranks that others wait for in a collective. Between collectives, and after the last one, code may take any time."""
    limit = seen.settings.hang_timeout
    if any(seen.now - worker.active_at <= limit for worker in seen.members):
        return
    inside = [worker for worker in seen.members if worker.phase is WorkerPhase.MEMBER]
    most = max((worker.activity.collectives for worker in inside), default=0)
    missed = [
        world.ranks[worker.worker]
        for worker in seen.members
        if worker.phase is WorkerPhase.VOTED and worker.activity.collectives < most
    ]
    if missed:
        yield Pointless(
            f"ranks {missed} returned while others waited for them in a collective for {limit:g} s (hang_timeout); all ranks "
            "have to call the same collectives"
        )
    elif late := find_late(inside, is_awaited=False):
        for worker in late:
            yield WorkerHung(
                worker.worker,
                f"hung: others had waited for it in a collective for {limit:g} s (hang_timeout; raise it where one rank works "
                "longer than that while others wait)",
            )
    elif any(worker.activity.waiting for worker in inside):
        yield _find_stuck(seen, world, inside, limit)


def _find_stuck(seen: Situation, world: Generation, inside: Sequence[Worker], limit: float) -> Finding:
    """Describe a world in which a rank waits although none is late for a collective of all ranks."""
    waiting = [world.ranks[worker.worker] for worker in inside if worker.activity.waiting]
    computing = [world.ranks[worker.worker] for worker in inside if not worker.activity.waiting]
    difference = {} if computing else find_difference(inside)
    named = ", ".join(
        f"{name} on ranks {[world.ranks[number] for number in those]}" for name, those in difference.items()
    )
    frozen = {worker.worker: worker.activity.frozen for worker in inside if worker.activity.frozen}
    if difference and list(frozen) == difference.get(COMMIT):
        return RanksDiffer(
            f"nothing of {next(iter(frozen.values()))} requires a gradient on ranks "
            f"{[world.ranks[number] for number in frozen]} only, of {len(world.members)}, and ranks had waited in different "
            f"collectives for {limit:g} s (hang_timeout): {named}. Change requires_grad on all ranks at the same step, and "
            "where the elastic function is entered again, from what the State says"
        )
    if difference:
        reason = f"ranks had waited in different collectives for {limit:g} s (hang_timeout): {named}"
    elif computing:
        reason = (
            f"ranks {waiting} had waited for {limit:g} s (hang_timeout) in a transfer, or in a collective of a group of the "
            f"user's own, while ranks {computing} computed; call state.heartbeat() in long code, or raise hang_timeout"
        )
    else:
        reason = f"all ranks had entered a collective that was not complete after {limit:g} s (hang_timeout)"
    return CollectivesStuck(
        reason, find_silent(seen, inside), all_wait=not computing, collectives_differ=bool(difference)
    )


def find_difference(inside: Sequence[Worker]) -> dict[str, list[int]]:
    """Find the first collective that differed between ranks. Return the workers by the name of what they entered, or {}."""
    entered = []
    for worker in inside:
        first = worker.activity.collectives - len(worker.activity.recent)
        entered.append({first + place: name for place, name in enumerate(worker.activity.recent)})
    for place in sorted(set(entered[0]).intersection(*entered[1:])):
        found: dict[str, list[int]] = {}
        for worker, names in zip(inside, entered, strict=True):
            found.setdefault(names[place], []).append(worker.worker)
        if len(found) > 1:
            return found
    return {}


def find_late(inside: Sequence[Worker], is_awaited: bool) -> list[Worker]:
    """Find ranks that compute while others wait for them, in a collective that they have not entered or to leave the world.

    If no rank waits, all of them compute for long. A rank that waits in a collective is not late for that collective.
    """
    computing = [worker for worker in inside if not worker.activity.waiting]
    awaited = max((worker.activity.collectives for worker in inside if worker.activity.waiting), default=None)
    if awaited is not None:
        return [worker for worker in computing if worker.activity.collectives < awaited]
    fewest = min((worker.activity.collectives for worker in inside), default=0)
    return [worker for worker in computing if worker.activity.collectives == fewest] if is_awaited else []


def find_silent(seen: Situation, inside: Sequence[Worker]) -> tuple[int, ...]:
    """Find the likely cause: the ranks with the most connections that do not answer. At least one rank with the state is left.

    A rank that is cut off has a silent connection to every other rank, each of which has only that one. Of two ranks the
    younger is chosen.
    """
    most = max((worker.activity.silent for worker in inside), default=0)
    found = [worker.worker for worker in inside if worker.activity.silent == most] if most else []
    found = found[-1:] if len(found) == len(seen.members) else found
    return () if last_holders(seen, set(found)) else tuple(found)


def missing_results(seen: Situation) -> Iterator[Finding]:
    """Find ranks whose result does not arrive, although they have left the elastic function with all others."""
    world, limit = seen.world, seen.settings.hang_timeout
    if world is None or world.phase is not WorldPhase.FINISHING:
        return
    if any(seen.now - worker.active_at <= limit for worker in seen.members):
        return
    missing = [worker for worker in seen.members if worker.phase is not WorkerPhase.DONE]
    if len(missing) < len(seen.members) or any(worker.activity.waiting for worker in missing):
        for worker in missing:
            yield WorkerHung(
                worker.worker,
                f"hung: its result had not come {limit:g} s after that of the others (hang_timeout; call state.heartbeat() in "
                "long code after the elastic function)",
            )


def late_survivors(seen: Situation) -> Iterator[Finding]:
    """Find survivors of an abort that stay in user code for longer than any rank may."""
    if seen.world is None:
        return
    limit = max(seen.settings.ready_timeout, _time_without_progress(seen, seen.world))
    called = [worker for worker in seen.members if worker.awaited_since is not None]
    # With a device's group, nobody can come back before all have answered. Until then, only ranks that have not are late.
    suspects = [worker for worker in called if seen.world.device_aborted or worker.worker not in seen.world.answered]
    awaited = {
        worker.worker: seen.now - worker.awaited_since
        for worker in suspects
        if worker.awaited_since is not None and seen.now - worker.awaited_since > limit
    }
    needed = last_holders(seen, awaited.keys())
    for worker, seconds in awaited.items():
        patience = _patience(seen, limit, worker in needed)
        if seconds > patience:
            which = "ready_timeout" if limit == seen.settings.ready_timeout else "hang_timeout"
            if worker in needed:
                which = "elastic_timeout, as nobody else held the newest commit"
            yield WorkerHung(
                worker,
                f"hung: did not return to its elastic function for {patience:g} s after a reset ({which}; call "
                "state.heartbeat() in long code)",
            )


def last_holders(seen: Situation, suspects: Set[int]) -> set[int]:
    """Find the workers that may be the last holders of the newest commit, if none but ``suspects`` is known to hold it.

    Only facts that hold at this moment count as known. A worker that has not been heard from for a while may have trained on
    since, and a member of a broken world that has neither come back nor answered the abort may find that it cannot go back to
    any commit (see ``in_place``). Before the first commit of a job, all members hold the same state.
    """
    members = {worker.worker for worker in seen.members}
    holding = seen.world.holding if seen.world is not None else set()
    candidates = [
        worker
        for worker in seen.workers.values()
        if worker.phase not in (WorkerPhase.LEAVING, WorkerPhase.DONE)
        and (worker.commit is not None or worker.worker in members)
    ]
    newest = max((worker.commit for worker in candidates if worker.commit is not None), default=None)
    is_broken = seen.world is not None and seen.world.phase is WorldPhase.BREAKING
    known = {
        worker.worker
        for worker in candidates
        if worker.commit == newest
        and _is_heard(seen, worker)
        and (worker.phase is WorkerPhase.READY or not is_broken or worker.worker in holding)
    }
    return set() if known - suspects else {worker.worker for worker in candidates}


def _is_heard(seen: Situation, worker: Worker) -> bool:
    """Whether what is known of a worker is up to date. A worker sends a heartbeat every second."""
    return seen.now - worker.heard <= min(HEARD_SECONDS, seen.settings.heartbeat_timeout / 2)


def _speaks(seen: Situation, worker: Worker) -> bool:
    """Whether a worker's Python runs. In one long call that does not release Python's lock it cannot tell what it has."""
    return seen.now - worker.spoke <= HEARD_SECONDS


def _lacks_state(worker: Worker, world: Generation) -> bool:
    """Whether a member has not told that it has this generation's state."""
    return worker.commit is None or worker.commit.generation < world.generation


def _patience(seen: Situation, limit: float, is_last_holder: bool) -> float:
    """Return how long to wait for a suspect. A job that cannot continue without it waits for up to ``elastic_timeout``.

    A fixed world grants no worker more time, because it starts over in any case.
    """
    return max(limit, seen.settings.elastic_timeout) if is_last_holder and seen.settings.elastic else limit


def _time_without_progress(seen: Situation, world: Generation) -> float:
    """Return how long a rank may show no progress: twice as long until all have made a commit in this generation.

    The first step of a generation may compile kernels, open files and fill a loader.
    """
    commits = [worker.commit for worker in seen.members]
    has_begun = all(c is not None and c.generation == world.generation and c.index > 0 for c in commits)
    return seen.settings.hang_timeout * (1 if has_begun else 2)


def slow_forming(seen: Situation) -> Iterator[Finding]:
    """Find a world whose ranks have not connected to each other in time."""
    world, limit = seen.world, seen.settings.form_timeout
    if world is None or world.phase is not WorldPhase.FORMING or seen.now - world.since <= limit:
        return
    ranks = [world.ranks[worker.worker] for worker in seen.members if worker.worker not in world.acknowledged]
    yield RanksUnconnected(f"ranks {ranks} did not connect within {limit:g} s")


def overdue_drains(seen: Situation) -> Iterator[Finding]:
    """Find draining hosts whose worker has not left before the deadline."""
    if seen.world is None or seen.world.phase is not WorldPhase.INTERRUPTING:
        return
    for worker in seen.members:
        host = seen.hosts.get(worker.host)
        if host is not None and host.drain_deadline is not None and seen.now >= host.drain_deadline:
            yield WorldStuck(f"{host.name} goes away before the next commit")
            return


def checks() -> tuple[Callable[[Situation], Iterator[Finding]], ...]:
    """Return the checks in the order in which the machine makes them."""
    return (
        silent_hosts,
        silent_workers,
        differing_ranks,
        stuck_collectives,
        missing_results,
        late_survivors,
        slow_forming,
        overdue_drains,
    )
