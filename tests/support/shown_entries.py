"""Entries of an event log as the progress line sees them: how a job begins, and what its ranks report."""

from __future__ import annotations

from spark_elastic.protocol.records import Entry, JobStarted, Record, WorkerReady, WorkerReported, WorldForming
from spark_elastic.protocol.reports import Entered, Progress, Report


def entry(record: Record, time: float = 0.0) -> Entry:
    return Entry(time, record)


def reported(report: Report, time: float = 0.0, rank: int = 0) -> Entry:
    return Entry(time, WorkerReported(worker=rank, rank=rank, generation=1, report=report))


def rows(time: float, epoch: int, done: int, step: int = 1) -> Entry:
    return reported(Progress(step, epoch, done, 1000), time)


START = [
    entry(JobStarted("run", min_np=1, num_proc=2, max_np=4, attempt=None, application="app")),
    entry(WorkerReady(0, 0, None)),
    entry(WorkerReady(1, 0, None)),
    entry(WorldForming(1, size=2, previous_size=0, workers=[0, 1], newest_commit=None)),
    reported(Entered(0)),
]
