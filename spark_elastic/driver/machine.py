"""DriverMachine: turns what happened (events) into what to do (commands).

It does no I/O, starts nothing and reads no clock, so that every schedule of faults can be replayed. Each formed world is a
*generation*. The tables in ``phases`` list the phases of worlds and workers.

``JobState`` holds everything that is known, and the steps by which it changes. For each event, the table below names the
function that notes it. Then ``advance`` does what has become possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver import host_events, timeouts, worker_events
from spark_elastic.driver.advance import advance
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.joining import joins_at
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.records import DriverPaused

# The function that notes an event, as long as the job is not over.
NOTED_BY: Mapping[type[ev.Event], Callable[[JobState, Any], None]] = {
    ev.TaskRegistered: host_events.task_registered,
    ev.TaskHeard: host_events.task_heard,
    ev.TaskLost: host_events.task_lost,
    ev.SlotGivenUp: host_events.slot_given_up,
    ev.HostDraining: host_events.host_draining,
    ev.HostsListed: host_events.hosts_listed,
    ev.WorkerConnected: worker_events.worker_connected,
    ev.WorkerSeen: worker_events.worker_seen,
    ev.WorkerHeard: worker_events.worker_heard,
    ev.WorkerGone: worker_events.worker_gone,
    ev.FaultStruck: worker_events.fault_struck,
    ev.WorkerExited: worker_events.worker_exited,
    ev.WorkerReady: worker_events.worker_ready,
    ev.GroupFormed: worker_events.group_formed,
    ev.WorkerAborted: worker_events.worker_aborted,
    ev.WorldBroken: worker_events.world_broken,
    ev.WorkerReturned: worker_events.worker_returned,
    ev.WorkerRaised: worker_events.worker_raised,
    ev.StepsTimed: worker_events.steps_timed,
    ev.ResultFlowed: worker_events.result_flowed,
    ev.ResultArrived: worker_events.result_arrived,
    ev.Tick: timeouts.time_passed,
}


class DriverMachine:
    """Decides for one job: ``note`` takes an event, and ``decide`` does what follows from all that is known.

    ``handle`` does both. Noting an event costs the same in a small and in a large world, while deciding looks at all workers,
    so a caller that gets many events at once notes them all and decides once. ``job`` is for reading only. Once ``job.over`` is
    true, nothing more is decided.
    """

    def __init__(self, settings: JobSettings, now: float) -> None:
        self.job = JobState(settings, now)

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Take note of an event at driver time ``now`` (monotonic seconds); return what to do, in order."""
        return [*self.note(event, now), *self.decide()]

    def note(self, event: ev.Event, now: float) -> list[do.Command]:
        """Take note of an event; return the commands that follow from it alone, in order."""
        job = self.job
        pause = job.clock.advance(now)
        if pause is not None and not job.over:
            job.record(DriverPaused(round(pause, 3)))
        job.history.happened(event, now)
        try:
            if job.over:
                self._after_the_end(event)
            else:
                NOTED_BY[type(event)](job, event)
        except Exception as error:
            raise job.history.fault(error) from error
        return job.take_commands()

    def decide(self) -> list[do.Command]:
        """Decide what the noted events have made possible; return what to do, in order."""
        job = self.job
        try:
            if not job.over:
                advance(job)
        except Exception as error:
            raise job.history.fault(error) from error
        return job.take_commands()

    def cancel(self, error: SparkElasticError) -> list[do.Command]:
        """End the job for an external reason."""
        self.job.end_if_explained(at_once=True)
        self.job.fail(error)
        return self.job.take_commands()

    def deadline(self) -> float | None:
        """Driver time at which a ``Tick`` is due before the regular one, or None."""
        job = self.job
        if job.over:
            return None if job.ending is None else job.ending[1]
        world = job.world
        to_abort = world.abort_at if world is not None and world.to_abort else None
        explained = world.explained_by if world is not None and world.explained_by > job.now else None
        times = [to_abort, explained, job.hosts.next_ready_at(job.now), joins_at(job.situation, job.admission)]
        known = [time for time in times if time is not None]
        return job.clock.to_driver_time(min(known)) if known else None

    def _after_the_end(self, event: ev.Event) -> None:
        """Note an event of a job that is over. Such a job admits nobody."""
        if isinstance(event, ev.TaskRegistered):
            self.job.order(do.ReleaseTask(event.host))
        elif isinstance(event, ev.TaskLost):
            host_events.task_lost(self.job, event)
        elif isinstance(event, ev.WorkerExited):
            meaning = self.job.book.meaning_of_exit(event.worker, event.code, event.last_lines)
            self.job.book.explain(event.worker, meaning, event.last_lines)
        self.job.end_if_explained()
