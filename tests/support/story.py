"""A run as its event log tells it: two workers, one of which is killed, and a third that takes its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import story

from spark_elastic.protocol.event_format import read_event
from spark_elastic.protocol.records import Entry


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"version": 1, "time": 1000.0 + time, "event": kind, **fields}


def told(kind: str, time: float, worker: int, rank: int, generation: int, **values: Any) -> dict[str, Any]:
    return event(kind, time, worker=worker, rank=rank, generation=generation, values=values)


def rows(time: float, generation: int, step: int) -> dict[str, Any]:
    return told(
        "progress", time, 0, 0, generation, step=step, epoch=step // 100, rows=10 * (step % 100), rows_total=1000
    )


def world(time: float, generation: int, workers: list[int], before: int, commit: str | None) -> list[dict[str, Any]]:
    size = len(workers)
    return [
        event(
            "world_forming",
            time,
            generation=generation,
            size=size,
            previous_size=before,
            workers=workers,
            newest_commit=commit,
        ),
        event("world_formed", time + 0.1, generation=generation, size=size, seconds=0.1),
    ]


def ready(time: float, worker: int, generation: int = 0, commit: str | None = None) -> dict[str, Any]:
    return event("worker_ready", time, worker=worker, generation=generation, commit=commit)


def killed() -> list[dict[str, Any]]:
    """Both train from 3.0 on; worker 1 dies at 10.0, its world of one trains from 10.6 on, worker 2 joins at 14."""
    return [
        event("job_started", 0, run_id="abcd", min_np=1, num_proc=2, max_np=3, attempt=None, application="app"),
        event("worker_starting", 1, worker=0, host=0, name="east"),
        event("worker_starting", 1, worker=1, host=1, name="west"),
        ready(2, 0),
        ready(2.5, 1),
        *world(2.6, 1, [0, 1], 0, None),
        told("entered", 3.0, 0, 0, 1, step=0),
        told("entered", 3.0, 1, 1, 1, step=0),
        rows(3.0, 1, 0),
        told("stepped", 3.1, 0, 0, 1, step=1),
        told("stepped", 3.1, 1, 1, 1, step=1),
        rows(9.9, 1, 69),
        event("fault_injected", 9.95, worker=1, rank=1, fault=0),
        event("worker_lost", 10.0, worker=1, rank=1, host="west", cause="its process died"),
        event("world_broken", 10.0, generation=1, reason="rank 1 on west was lost: its process died"),
        event("worker_exited", 10.05, worker=1, code=-9, meaning="killed by SIGKILL", explains=True),
        event("worker_starting", 10.1, worker=2, host=1, name="west"),
        ready(10.2, 0, 1, "1.69"),
        *world(10.3, 2, [0], 2, "1.69"),
        told("entered", 10.6, 0, 0, 2, step=69, idle=0.7),
        told("stepped", 10.8, 0, 0, 2, step=70),
        rows(10.8, 2, 70),
        ready(13.9, 2),
        event("world_interrupted", 14.0, generation=2, reason="workers arrived"),
        rows(14.4, 2, 105),
        ready(14.5, 0, 2, "2.36"),
        *world(14.6, 3, [0, 2], 1, "2.36"),
        told("entered", 14.9, 0, 0, 3, step=105, idle=0.5),
        told("entered", 15.0, 2, 1, 3, step=105),
        told("stepped", 15.1, 0, 0, 3, step=106),
        told("stepped", 15.1, 2, 1, 3, step=106),
        told("metrics", 15.2, 0, 0, 3, step=106, loss=0.5, name="x"),
        told("metrics", 15.2, 2, 1, 3, step=106, loss=0.7),
        rows(19.9, 3, 200),
        event("world_finished", 19.9, generation=3, size=2),
        event("result_arrived", 20.0, worker=0),
        event("result_arrived", 20.0, worker=2),
        event("job_finished", 20.0, workers=[0, 2], resets=1),
    ]


def entries(events: Iterable[dict[str, Any]]) -> list[Entry]:
    return [read_event(event) for event in events]


def sampled(time: float, worker: int, seconds: float, *lines: str) -> dict[str, Any]:
    return story.event(
        "worker_sampled", time, worker=worker, cpu_seconds=seconds, memory=2**30, last_lines=list(lines) or None
    )
