"""Losses: what follows when a worker is lost, when a world cannot continue, and when nobody holds the state any more."""

from __future__ import annotations

from spark_elastic.driver import commands as do
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.forming import choose_replaced
from spark_elastic.driver.generation import Generation
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.phases import WorkerPhase, WorldChange, WorldPhase
from spark_elastic.driver.watchdog import CollectivesStuck
from spark_elastic.driver.workers import Worker
from spark_elastic.errors import TrainingFailedError, WorkerFailure, name_worker
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.records import HostCooling, NewcomersPaused, StateLost, WorkerLost, WorldBroken

# How long a world in which a rank has raised waits before its other ranks are called back. A mistake in user code is usually
# one on all ranks, and who is called back a moment before raising it would train on, until the next world raises it.
RAISE_SECONDS = 0.5
# How long the end of a job that has had too many resets waits for the loss that a rank has felt and reported before the driver
# has heard of it.
EXPLAIN_SECONDS = 5.0

# ---------------------------------------------------------------------- a worker


def lose_worker(job: JobState, number: int, why: str | FirstSign) -> None:
    """Take a worker out of the job. Everything that it sends from now on is ignored."""
    worker = job.workers.get(number)
    if worker is None or worker.phase is WorkerPhase.DONE or job.over:
        return
    job.order(*job.roster.remove(worker))
    if worker.phase is WorkerPhase.LEAVING:
        return
    _note_loss(job, worker, why)
    if job.elastic_since is None:
        _count_lost_start(job, worker)
    if job.world is not None and number in job.world.ranks:
        _lose_member(job, job.world, worker)


def _note_loss(job: JobState, worker: Worker, why: str | FirstSign) -> None:
    """Note why a worker was lost, and blame its place."""
    number, rank = worker.worker, job.situation.rank_of(worker.worker)
    cause, is_explained = (why.value, False) if isinstance(why, FirstSign) else (why, True)
    if number not in job.book.failures:
        job.book.add(WorkerFailure(number, rank, worker.host_name, cause), is_explained=is_explained)
    job.record(WorkerLost(number, rank, worker.host_name, cause))
    pause = job.roster.blame_place(worker, job.now, is_member=job.is_member(number))
    if pause:
        job.record(HostCooling(worker.host, worker.host_name, round(pause, 3)))


def _count_lost_start(job: JobState, worker: Worker) -> None:
    """Count a loss before the elastic function. Exceptions have a count of their own; a fixed world counts when it breaks."""
    others = min((other.started_at for other in job.workers.values()), default=job.now)
    failure, story = job.book.failures[worker.worker], job.book.story()
    runs_again = job.settings.elastic and worker.phase is not WorkerPhase.STARTING and not failure.traceback
    job.fail_if(job.setbacks.lost_start(job.now, worker.started_at, others, failure.as_loss(), story, runs_again))


def _lose_member(job: JobState, world: Generation, worker: Worker) -> None:
    """Break the world of a worker that was lost; end the job if no world can follow."""
    failure = job.book.failures[worker.worker]
    if world.phase is WorldPhase.FINISHING and job.settings.elastic:
        what = "raised" if failure.traceback else "was lost"
        when = "after training had finished, before its result arrived"
        job.fail(TrainingFailedError(f"rank {world.ranks[worker.worker]} {what} {when}", job.book.story()))
        return
    is_joining = job.situation.is_joining(worker)
    _forgive_the_blamed(job, world)
    if worker.phase is not WorkerPhase.READY:  # a worker that is ready has left all collectives
        if is_joining:
            _count_failed_newcomer(job, world, worker, failure.cause)
        if not failure.traceback:
            world.abort_at = job.now
        elif world.phase in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING):
            world.abort_at = job.now + RAISE_SECONDS
        break_world(job, failure.as_loss(), worker.worker, is_newcomers=is_joining)
    if not job.over and not job.members:
        _all_members_lost(job, world)


def _forgive_the_blamed(job: JobState, world: Generation) -> None:
    """Take back the blame for a world that has not formed: the loss of a worker explains it."""
    if not world.was_formed:
        for number in world.blamed & set(job.workers):
            job.workers[number].form_failures -= 1
        world.blamed.clear()


def _count_failed_newcomer(job: JobState, world: Generation, newcomer: Worker, cause: str) -> None:
    """Count, once per world, a newcomer that has broken a world in which others train. Further ones may have to wait."""
    if world.newcomers_failed:
        return
    world.newcomers_failed = True
    pause = job.admission.failed(job.now, job.now - world.since)
    if pause:
        who = f"{name_worker(newcomer.worker, world.ranks[newcomer.worker])} on {newcomer.host_name}"
        job.record(NewcomersPaused(None, job.admission.failures, pause, f"{who} {cause}"))


# ---------------------------------------------------------------------- a world


def break_world(
    job: JobState,
    reason: str,
    lost: int | None = None,
    is_newcomers: bool | None = None,
    *,
    is_report: bool = False,
) -> None:
    """Break a world that cannot continue: have all ranks abort their collectives and come back to the elastic function.

    ``lost``: the worker whose loss breaks it, if that is the reason.
    ``is_newcomers``: True if a newcomer was lost, False if another member was; None if nobody is known to be lost.
    ``is_report``: a rank has reported it, and a loss that explains it may be heard of in a moment.
    """
    world = job.world
    assert world is not None
    if world.phase is not WorldPhase.BREAKING:
        job.change_world(WorldChange.BROKE)
        world.broken_by = reason
        job.record(WorldBroken(world.generation, reason, lost))
        if is_newcomers is None:  # another rank may notice and report a newcomer's end before the driver does
            is_newcomers = any(map(job.situation.is_joining, job.members))
        world.counts_as_reset = not is_newcomers
        job.setbacks.broke(is_newcomers)
    elif is_newcomers is False and not world.counts_as_reset:
        world.counts_as_reset = True
        job.setbacks.counts()
    if lost is not None:
        world.broken_by_loss = reason
    if is_report:
        world.explained_by = job.now + EXPLAIN_SECONDS
    elif end_at_limit(job, reason):
        return
    waiting = [worker for worker in job.members if worker.phase in (WorkerPhase.MEMBER, WorkerPhase.VOTED)]
    fresh = [worker for worker in waiting if worker.awaited_since is None]
    for worker in fresh:
        worker.awaited_since = job.now
    world.to_abort += [worker.worker for worker in fresh]
    abort_if_due(job)


def end_at_limit(job: JobState, reason: str) -> bool:
    """End the job if failures have caused more resets than it may have. Return whether they have. ``reason``: the last one's."""
    return job.fail_if(job.setbacks.over_limit(reason, job.book.story()))


def end_at_limit_if_due(job: JobState) -> bool:
    """End an elastic job that has had too many resets, the last one by a rank's report, if no loss is going to explain it.

    A rank may report the loss of another one before the driver hears of it, and the error is to name the one that was lost. Once
    all that are left are ready, nobody is missing.
    """
    world = job.world
    if world is None or world.phase is not WorldPhase.BREAKING:
        return False
    may_explain = not world.broken_by_loss and job.now < world.explained_by
    if may_explain and any(worker.phase is not WorkerPhase.READY for worker in job.members):
        return False
    return end_at_limit(job, world.broken_by_loss or world.broken_by)


def abort_if_due(job: JobState) -> None:
    """Call back the ranks of a broken world that have not come back by themselves, once that has not to wait any more."""
    world = job.world
    if world is None or not world.to_abort or job.now < world.abort_at:
        return
    awaited = tuple(n for n in world.to_abort if n in job.workers and job.workers[n].awaited_since is not None)
    world.to_abort.clear()
    if awaited:
        job.order(do.AbortWorld(world.generation, awaited, world.broken_by))


def note_survivors_commit(job: JobState, commit: CommitId | None) -> None:
    """Count a world's end as a reset if a survivor's commit shows that the newcomer which broke the world had trained.

    No rank can make its second commit in a world before every rank has made its first. The newcomer's own report of that may
    never have arrived.
    """
    world = job.world
    if commit is None or world is None or world.phase is not WorldPhase.BREAKING or world.counts_as_reset:
        return
    if commit.generation == world.generation and commit.index > 1:
        world.counts_as_reset = True
        job.setbacks.counts()


def break_unconnected(job: JobState, reason: str) -> None:
    """Break a world whose ranks have not connected to each other, and replace the workers that are to blame."""
    world = job.world
    assert world is not None
    members = job.members
    missing = [worker for worker in members if worker.worker not in world.acknowledged]
    for worker in missing:
        worker.form_failures += 1
        world.blamed.add(worker.worker)
    cost = job.now - world.since
    replaced = choose_replaced(members, missing, took_long=cost >= job.settings.form_timeout / 2)
    break_world(job, reason)
    for worker in replaced:
        if not worker.has_connected:
            pause = job.admission.unconnected(worker.place, job.now, cost)
            job.record(NewcomersPaused(worker.host_name, 1, pause, "nobody could connect to them"))
        lose_worker(job, worker.worker, f"could not connect to the others ({worker.form_failures} times in a row)")


def break_stuck(job: JobState, stuck: CollectivesStuck) -> None:
    """Break a stuck world. The next one has new connections; if it gets stuck, too, silent workers are given up."""
    if job.fail_if(
        job.setbacks.got_stuck(
            stuck.reason, bool(stuck.silent), stuck.all_wait, job.book.story(), stuck.collectives_differ
        )
    ):
        return
    break_world(job, stuck.reason)
    if job.setbacks.is_stuck_again:
        for number in stuck.silent:
            lose_worker(job, number, "its connections to the others were silent in two worlds in a row")


def _all_members_lost(job: JobState, world: Generation) -> None:
    members = len(world.members)
    what = f"all {members} workers of generation {world.generation} were lost"
    if members == 1:
        what = f"the only worker of generation {world.generation} was lost"
    if not job.settings.elastic:
        pass  # a fixed world keeps no state: the whole function runs again
    elif world.raised >= set(world.workers):
        who = f"all {members} workers" if members > 1 else "the only worker"
        job.fail(TrainingFailedError(f"{who} of the world raised", job.book.story()))
    elif any(worker.phase is WorkerPhase.READY and worker.commit is not None for worker in job.workers.values()):
        pass  # a worker whose host drains still holds a commit until it is dismissed
    elif world.was_formed or job.newest_commit is not None:
        lose_state(job, what)
    else:
        # No worker had begun to train, so the next world starts from the beginning.
        job.drop_world(WorldChange.LOST)
        job.give_up_if_pointless()


# ---------------------------------------------------------------------- the state


def lose_state(job: JobState, what: str) -> None:
    """Continue from the newest durable checkpoint, as a new run would, or fail: nobody holds the state any more."""
    if job.fail_if(job.setbacks.lost_state(what, job.book.story())):
        return
    job.record(StateLost(job.generation, what))
    job.drop_world(WorldChange.LOST)
    job.give_up_if_pointless()
