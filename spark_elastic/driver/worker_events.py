"""What each event of a worker means for the job: one function per event.

Messages of lost workers are ignored, and so are messages about a world that is over.
"""

from __future__ import annotations

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.generation import Generation
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.losses import break_unconnected, break_world, lose_worker, note_survivors_commit
from spark_elastic.driver.phases import WorkerChange, WorkerPhase, WorldChange, WorldPhase
from spark_elastic.driver.slowness import can_spare, may_replace
from spark_elastic.driver.workers import Worker
from spark_elastic.errors import TrainingFailedError, WorkerFailure
from spark_elastic.protocol import records

# ---------------------------------------------------------------------- its process


def worker_connected(job: JobState, event: ev.WorkerConnected) -> None:
    """A worker's process has connected to the driver."""
    worker = job.workers.get(event.worker)
    if worker is not None and worker.phase is WorkerPhase.STARTING:
        worker.enter(WorkerChange.CONNECTED)
        worker.heard = job.now
    elif worker is not None and worker.phase is WorkerPhase.LEAVING:
        job.order(do.LeaveJob(event.worker))


def worker_seen(job: JobState, event: ev.WorkerSeen) -> None:
    """A worker's process is alive, even if one long call keeps its Python from saying so. It need not make progress."""
    worker = job.workers.get(event.worker)
    if worker is not None and worker.phase is not WorkerPhase.STARTING:
        worker.heard = job.now


def worker_heard(job: JobState, event: ev.WorkerHeard) -> None:
    """A worker reports that it is alive, and how far it has come."""
    worker = job.workers.get(event.worker)
    if worker is None:
        return
    worker.heard = worker.spoke = job.now
    if event.beats != worker.beats:
        worker.beats = event.beats
        worker.active_at = job.now
        if worker.awaited_since is not None:
            worker.awaited_since = job.now
    if job.world is not None and event.generation == job.world.generation and job.is_member(event.worker):
        known, worker.activity = worker.activity, event.activity
        if (known.collectives, known.moved) != (event.activity.collectives, event.activity.moved):
            worker.active_at = job.now
        job.note_commit(worker, event.commit)


def worker_gone(job: JobState, event: ev.WorkerGone) -> None:
    """A worker's process or connection has ended, and its exit code is not known yet."""
    if job.situation.speaks_of_the_job(event.worker):
        job.exits_to_count.add(event.worker)
    lose_worker(job, event.worker, event.sign)


def fault_struck(job: JobState, event: ev.FaultStruck) -> None:
    """An injected fault is about to end a worker's process."""
    job.book.injected[event.worker] = event.fault


def worker_exited(job: JobState, event: ev.WorkerExited) -> None:
    """A worker's process has ended, and its exit code is known."""
    if job.roster.exited(event.worker, on=event.host):
        return
    meaning = job.book.meaning_of_exit(event.worker, event.code, event.last_lines)
    if event.worker in job.workers:
        if job.situation.speaks_of_the_job(event.worker):
            job.exits_to_count.add(event.worker)
        lose_worker(job, event.worker, meaning)
    is_why = job.book.explain(event.worker, meaning, event.last_lines)
    if event.worker in job.exits_to_count and not job.over:
        job.exits_to_count.discard(event.worker)
        job.book.count_exit(job.generation, event.code)
        if job.world is None:
            job.give_up_if_pointless()
    host = job.hosts.get(event.host)
    if host is not None and host.at_fault and not job.over:
        known = job.book.failures.get(event.worker)
        cause = known.cause if known is not None else meaning
        job.order(do.RestartTask(host.host, f"its workers keep failing, the last one: {cause}"))
    job.record(records.WorkerExited(event.worker, event.code, meaning, is_why, list(event.last_lines) or None))


# ---------------------------------------------------------------------- its world


def worker_ready(job: JobState, event: ev.WorkerReady) -> None:
    """A worker has reached the elastic function, for the first time or again after a world."""
    worker = job.workers.get(event.worker)
    if worker is None or worker.phase in (WorkerPhase.LEAVING, WorkerPhase.DONE):
        return
    worker.heard = job.now
    if not job.is_member(event.worker) and event.commit is not None:
        return  # only members of a world can have made or received a commit
    if job.elastic_since is None:
        job.elastic_since = job.now
    world = job.world
    if world is not None and event.worker in world.ranks:
        if event.generation != world.generation:
            return
        if not _is_expected(worker, world, event.reason):
            _break_because_left(job, world, event)
        if event.worker not in job.workers:
            return
    worker.enter(WorkerChange.STOOD_READY)
    worker.ready_at = worker.active_at = job.now
    worker.awaited_since = None
    worker.commit = event.commit
    worker.slices = event.slices
    job.note_commit(worker, event.commit)
    job.record(records.WorkerReady(event.worker, event.generation, None if event.commit is None else str(event.commit)))
    note_survivors_commit(job, event.commit)


def _is_expected(worker: Worker, world: Generation, reason: str | None) -> bool:
    """Whether a rank was to come back. After a planned interrupt, ranks do so without a reason; others have been called back."""
    if world.phase is WorldPhase.INTERRUPTING and not reason:
        return True
    return worker.awaited_since is not None or world.phase is WorldPhase.FINISHING


def _break_because_left(job: JobState, world: Generation, event: ev.WorkerReady) -> None:
    reason = f"rank {world.ranks[event.worker]} reports: {event.reason or 'it left without being asked to'}"
    if world.phase is WorldPhase.FORMING:
        break_unconnected(job, reason)
    else:
        break_world(job, reason, is_report=True)


def group_formed(job: JobState, event: ev.GroupFormed) -> None:
    """A worker has connected to all other ranks of its world."""
    world = job.world
    if world is None or event.generation != world.generation or event.worker not in job.workers:
        return
    if event.worker in world.ranks:
        world.acknowledged.add(event.worker)
    if world.phase is WorldPhase.FORMING and len(world.acknowledged) == len(world.members):
        job.change_world(WorldChange.CONNECTED)
        world.was_formed = True
        job.setbacks.formed()
        for worker in job.members:
            worker.active_at = job.now
            worker.form_failures = 0
            worker.has_connected = True
        seconds = round(job.now - world.since, 4)
        job.record(records.WorldFormed(world.generation, len(world.members), seconds))


def worker_aborted(job: JobState, event: ev.WorkerAborted) -> None:
    """A worker has aborted its collectives, and reports to which commit it can go back."""
    worker = job.workers.get(event.worker)
    if worker is None or job.world is None or event.generation != job.world.generation:
        return
    worker.heard = job.now
    if job.is_member(event.worker):
        job.world.answered.add(event.worker)
        if event.commit is not None:
            job.world.holding.add(event.worker)
        job.note_commit(worker, event.commit)
        note_survivors_commit(job, event.commit)


def world_broken(job: JobState, event: ev.WorldBroken) -> None:
    """A worker reports that its world cannot continue."""
    world = job.world
    if world is None or event.generation != world.generation or event.worker not in job.workers:
        return
    if event.worker in world.ranks and world.phase in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING):
        break_world(job, f"rank {world.ranks[event.worker]} reports: {event.reason}", is_report=True)


def steps_timed(job: JobState, event: ev.StepsTimed) -> None:
    """All ranks have timed their steps. The times may show that a worker is slow or too slow, or that fewer are faster."""
    world = job.world
    if world is None or event.generation != world.generation or not _is_credible(event, world):
        return
    if any(number not in job.workers for number in world.workers):
        return  # a rank has been lost, and the world ends
    _tell_slow(job, world, event)
    _replace_slow(job, world, event)
    sized = job.sizing.measured(event.generation, event.rows, event.period, event.microseconds, event.fixed)
    if sized is not None:
        job.record(sized)


def _tell_slow(job: JobState, world: Generation, event: ev.StepsTimed) -> None:
    """Report once per worker that the others wait for it in every step. If rows have moved, nobody waits."""
    if max(event.shares) - min(event.shares) > 1:
        return
    slow = job.slow.measured(event.generation, event.shares, event.microseconds)
    if slow is None:
        return
    worker = job.workers[world.workers[slow.rank]]
    if worker.worker not in job.told_slow:
        job.told_slow.add(worker.worker)
        job.record(records.WorkerSlow(worker.worker, slow.rank, worker.host_name, slow.times))


def _replace_slow(job: JobState, world: Generation, event: ev.StepsTimed) -> None:
    """Have a worker that is too slow leave at the next commit, like one whose host drains."""
    slow = job.too_slow.measured(event.generation, event.shares, event.microseconds)
    if slow is None or job.replacements.are_paused(job.now) or not may_replace(job.situation):
        return
    worker = job.workers[world.workers[slow.rank]]
    seconds = None
    if can_spare(job.situation, worker):
        seconds = job.replacements.begin(job.now)
        job.hosts.worker_too_slow(worker.place, job.now + seconds)
    elif worker.worker in world.recorded_slow:
        return
    world.recorded_slow.add(worker.worker)
    job.record(records.WorkerTooSlow(worker.worker, slow.rank, worker.host_name, slow.times, seconds))
    if seconds is not None:
        job.order(*job.roster.take_away(worker.host, None, job.ranks))


def _is_credible(timed: ev.StepsTimed, world: Generation) -> bool:
    """Whether the measurements come from rank 0, one per rank. A worker's mistake in them must not end the job."""
    return (
        timed.worker == world.workers[0]
        and len(timed.shares) == len(timed.microseconds) == len(world.members)
        and min(timed.shares) >= 0
        and min(timed.microseconds) > 0
        and min(timed.period, timed.rows, timed.fixed) >= 0
    )


# ---------------------------------------------------------------------- the user's function


def worker_returned(job: JobState, event: ev.WorkerReturned) -> None:
    """A worker has returned from the elastic function, and waits for the other ranks."""
    worker = job.workers.get(event.worker)
    world = job.world
    if (
        worker is None
        or world is None
        or event.generation != world.generation
        or worker.phase is not WorkerPhase.MEMBER
    ):
        return
    job.note_commit(worker, event.commit)
    worker.active_at = job.now
    worker.enter(WorkerChange.RETURNED)


def worker_raised(job: JobState, event: ev.WorkerRaised) -> None:
    """The user's function has raised in a worker."""
    worker = job.workers.get(event.worker)
    if worker is None or worker.phase is WorkerPhase.LEAVING:
        return
    world = job.world
    failure = WorkerFailure(
        event.worker,
        job.situation.rank_of(event.worker),
        worker.host_name,
        f"raised {event.error}",
        event.traceback,
    )
    job.book.add(failure)
    job.book.kinds[event.worker] = event.kind
    job.record(records.WorkerRaised(event.worker, failure.rank, event.error, event.traceback))
    if world is not None and event.worker in world.ranks:
        world.raised.add(event.worker)
    if event.fatal:
        job.order(*job.roster.remove(worker))  # its end, for which the error waits, does not wait for the job's
        job.fail(TrainingFailedError(event.error, (failure,)))
        return
    if job.situation.speaks_of_the_job(event.worker):
        job.book.count_exception(job.generation, event.where, event.error)
    lose_worker(job, event.worker, f"raised {event.error}")
    if world is None and not job.over:
        job.give_up_if_pointless()


def result_flowed(job: JobState, event: ev.ResultFlowed) -> None:
    """A piece of a worker's result has arrived."""
    worker = job.workers.get(event.worker)
    if worker is not None:
        worker.heard = worker.active_at = job.now


def result_arrived(job: JobState, event: ev.ResultArrived) -> None:
    """The user's function has returned in a worker, and its result has arrived."""
    worker = job.workers.get(event.worker)
    if worker is None:
        return
    worker.heard = job.now
    finishing = job.world is not None and job.world.phase is WorldPhase.FINISHING
    if event.elastic and not (finishing and job.is_member(event.worker)):
        return  # no worker has been told that all have left the elastic function
    if not event.elastic and (job.elastic_since is not None or job.generation > 0):
        failure = WorkerFailure(
            event.worker, None, worker.host_name, "fn returned without calling its elastic function"
        )
        job.fail(
            TrainingFailedError(
                "fn has an elastic function, but one worker returned without calling it; every worker has to",
                (failure,),
            )
        )
        return
    if worker.phase is WorkerPhase.DONE:
        return
    worker.active_at = job.now
    worker.enter(WorkerChange.DELIVERED)
    job.record(records.ResultArrived(event.worker))
