"""Timeouts: what follows when ``watchdog`` and ``Shortage`` find that something has not happened in time."""

from __future__ import annotations

from spark_elastic._exhaustive import assert_never
from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver import watchdog
from spark_elastic.driver.host_events import task_lost
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.losses import break_stuck, break_unconnected, break_world, lose_worker
from spark_elastic.errors import RanksDifferError, TrainingFailedError


def time_passed(job: JobState, event: ev.Tick) -> None:
    """Find what is overdue. What one check finds is acted on before the next check is made."""
    for host in job.hosts:
        host.heard = job.now if host.heard is None else host.heard
    for check in watchdog.checks():
        if not job.over:
            for finding in list(check(job.situation)):
                _act_on(job, finding)
    if not job.over:
        _check_shortage(job)


def _act_on(job: JobState, finding: watchdog.Finding) -> None:
    match finding:
        case watchdog.HostSilent(host, reason):
            job.order(do.RestartTask(host, reason))
            task_lost(job, ev.TaskLost(host, reason))
        case watchdog.WorkerHung(worker, cause):
            lose_worker(job, worker, cause)
        case watchdog.RanksUnconnected(reason):
            break_unconnected(job, reason)
        case watchdog.WorldStuck(reason):
            break_world(job, reason)
        case watchdog.CollectivesStuck():
            break_stuck(job, finding)
        case watchdog.Pointless(reason):
            job.fail(TrainingFailedError(reason, job.book.story()))
        case watchdog.RanksDiffer(reason):
            job.fail(RanksDifferError(reason, job.book.story()))
        case _:
            assert_never(finding)


def _check_shortage(job: JobState) -> None:
    if job.shortage.is_time_to_yield(job.situation):
        job.order(*job.roster.yield_slots())
    job.fail_if(job.shortage.verdict(job.situation, job.elastic_since))
