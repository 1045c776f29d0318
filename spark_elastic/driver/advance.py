"""Advance: do what has become possible after an event has been noted.

Each step looks at the whole state, whatever the event was, and asks the pure functions of ``voting``, ``joining`` and
``forming``.
"""

from __future__ import annotations

from spark_elastic.driver import commands as do
from spark_elastic.driver.forming import choose_next, find_drained, find_left_out, is_gathered, is_sealed, newest_commit
from spark_elastic.driver.generation import Generation
from spark_elastic.driver.holders import tell_loss
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.joining import find_interrupt
from spark_elastic.driver.losses import abort_if_due, end_at_limit, end_at_limit_if_due, lose_state
from spark_elastic.driver.phases import WorkerChange, WorkerPhase, WorldChange, WorldPhase
from spark_elastic.driver.ranks import assign_ranks
from spark_elastic.driver.voting import find_to_call_back, have_all_delivered, have_all_voted
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import Activity, CommitId, Member
from spark_elastic.protocol.records import RunAgain, WorldFinished, WorldForming, WorldInterrupted


def advance(job: JobState) -> None:
    """Do whatever has become possible."""
    if not job.settings.elastic and job.world is not None and job.world.phase is WorldPhase.BREAKING:
        if end_at_limit(job, job.world.broken_by):
            return
        _run_again(job, job.world)
    if end_at_limit_if_due(job):
        return
    abort_if_due(job)
    _start_workers(job)
    job.order(*job.roster.release_drained())
    _finish_if_voted(job)
    if job.world is not None and job.world.phase is WorldPhase.FINISHING:
        if have_all_delivered(job.situation):
            job.change_world(WorldChange.DELIVERED)
            job.finish(job.world.workers)
        return
    if job.elastic_since is None and _finish_plain(job):
        return
    _abort_device_if_all_answered(job)
    _dismiss_others_if_sealed(job)
    _interrupt_if_planned(job)
    _form_if_ready(job)
    job.shortage.note(job.situation)


def _run_again(job: JobState, world: Generation) -> None:
    """End what is left of a fixed world; the next one runs the whole of the user's function again, in new processes."""
    # Workers that have delivered a result end, too: a result is of no use without those of the other ranks.
    job.order(*job.roster.kill(job.members))
    job.record(RunAgain(world.generation))
    job.drop_world(WorldChange.REPEATED)


def _start_workers(job: JobState) -> None:
    if job.world is not None and job.world.phase is WorldPhase.FINISHING:
        return
    # A function without an elastic part runs in at most num_proc workers.
    limit = job.plain_target or job.settings.num_proc if job.elastic_since is None else None
    if job.sizing.limit is not None:
        limit = job.sizing.limit + sum(not _can_train(job, worker) for worker in job.workers.values())
    job.hosts.forgive_if_short(job.settings.min_np, job.now)
    job.order(*job.roster.start_workers(job.now, limit))


def _can_train(job: JobState, worker: Worker) -> bool:
    """Whether a worker trains, or may train as soon as it is ready."""
    if worker.phase is WorkerPhase.LEAVING or job.situation.is_draining(worker):
        return False
    return job.is_member(worker.worker) or job.admission.opens_at(worker.place) <= job.now


# ---------------------------------------------------------------------- the end


def _finish_if_voted(job: JobState) -> None:
    if have_all_voted(job.situation):
        world = job.change_world(WorldChange.VOTED)
        job.order(do.FinishWorld(world.generation, world.workers))
        job.record(WorldFinished(world.generation, len(world.members)))
        others = [worker for worker in job.workers.values() if worker.worker not in world.ranks]
        job.order(*job.roster.dismiss(others))
    elif voted := find_to_call_back(job.situation):
        for worker in voted:
            worker.enter(WorkerChange.CALLED_BACK)
            worker.awaited_since = job.now
        numbers = tuple(worker.worker for worker in voted)
        job.order(do.AbortWorld(job.generation, numbers, "other ranks were interrupted"))


def _finish_plain(job: JobState) -> bool:
    """End a job whose function has no elastic part once enough results are there. Return whether it did."""
    target = job.plain_target
    if target is None:
        target = job.settings.num_proc
        if job.now - job.started >= job.settings.start_timeout and job.settings.min_np <= len(job.workers):
            target = job.plain_target = min(len(job.workers), target)
    done = [worker.worker for worker in job.workers.values() if worker.phase is WorkerPhase.DONE]
    if len(done) < target:
        return False
    job.finish(tuple(sorted(done)[:target]))
    return True


# ---------------------------------------------------------------------- from one world to the next


def _abort_device_if_all_answered(job: JobState) -> None:
    """Have the device's group aborted once all members have reported what they had completed.

    An abort on one rank can complete the collectives of other ranks with garbage, so the abort waits until all have reported. A
    member that is ready has left its collectives and need not report.
    """
    world = job.world
    if world is None or world.device_aborted or not world.answered:
        return
    members = job.members
    inside = [worker for worker in members if worker.phase in (WorkerPhase.MEMBER, WorkerPhase.VOTED)]
    if all(worker.awaited_since is not None and worker.worker in world.answered for worker in inside):
        world.device_aborted = True
        for worker in inside:
            worker.awaited_since = job.now
        job.order(do.AbortDevice(world.generation, tuple(worker.worker for worker in members)))


def _dismiss_others_if_sealed(job: JobState) -> None:
    """Dismiss workers that have left because of a drain or a smaller world, once nobody needs their commits any more."""
    seen = job.situation
    if seen.world is not None and is_sealed(seen):
        job.order(*job.roster.dismiss(find_drained(seen, kept=seen.world.ranks)))
        job.order(*job.roster.dismiss(find_left_out(seen, kept=seen.world.ranks)))


def _interrupt_if_planned(job: JobState) -> None:
    interrupt = find_interrupt(job.situation, job.admission)
    if interrupt is not None:
        world = job.change_world(WorldChange.INTERRUPTED)
        job.order(do.InterruptWorld(world.generation, world.workers))
        job.record(WorldInterrupted(world.generation, interrupt.reason, interrupt.cause.value))


def _form_if_ready(job: JobState) -> None:
    if not is_gathered(job.situation):
        return
    if job.world is not None and job.world.phase is WorldPhase.BREAKING and job.give_up_if_pointless():
        return
    newest = newest_commit(job.situation)
    if newest is None and job.newest_commit is not None:
        # The workers that are left have not received that commit yet, or commit in place and were caught in mid-step, or keep
        # slices of commits, some of which were lost with all workers that held them.
        lose_state(job, tell_loss(job.members, job.ranks, job.newest_commit))
        if job.over:
            return
    seen = job.situation
    chosen = choose_next(seen, job.admission, newest)
    if len(chosen) >= seen.needed:
        _form(job, assign_ranks(chosen, newest), newest)
    else:
        # A worker whose host drains and whose commit nobody needs would only hold a slot that others may need.
        job.order(*job.roster.dismiss(find_drained(seen, kept={worker.worker for worker in chosen})))


def _form(job: JobState, members: tuple[Member, ...], newest: CommitId | None) -> None:
    world = job.begin_world(members)
    if job.fail_if(job.setbacks.forming(job.book.story())):
        return
    previous_size = job.sizes[newest.generation] if newest is not None else 0
    for member in members:
        worker = job.workers[member.worker]
        worker.enter(WorkerChange.CHOSEN)
        worker.activity = Activity()
        worker.active_at = job.now
        worker.awaited_since = None
    job.order(do.FormWorld(world.generation, members, previous_size))
    workers = [member.worker for member in members]
    job.record(
        WorldForming(world.generation, len(members), previous_size, workers, None if newest is None else str(newest))
    )
