"""The events of an event log and their fields. ``docs/events.md`` is made from this: python -m spark_elastic.timeline.schema."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spark_elastic.driver.event_log import SCHEMA_VERSION

COMMON = {
    "version": "int; of this schema",
    "time": "float; seconds since 1970, of the driver's clock",
    "event": "str; one of those below",
}
# Of what workers report. Their own facts are in ``values``.
_FROM_WORKER = {
    "worker": "int; the worker's number in this run",
    "rank": "int or null; null before its first world",
    "generation": "int; 0 before its first world",
}

# What each event means; its fields; and for those that workers report, what is in ``values``.
EVENTS: dict[str, tuple[str, dict[str, str], dict[str, str] | None]] = {
    "job_started": (
        "A run begins. A file to which several runs are appended has one of these for each.",
        {
            "run_id": "str; also in the names of its Spark jobs",
            "min_np": "int",
            "num_proc": "int",
            "max_np": "int",
            "attempt": "int or null; of the checkpoint directory",
            "application": "str; Spark's name for the application",
        },
        None,
    ),
    "job_finished": (
        "All results are there.",
        {"workers": "list; in rank order", "resets": "int; those caused by failures"},
        None,
    ),
    "job_failed": ("The run raises.", {"error": "str; the exception's class", "message": "str"}, None),
    "host_registered": (
        "A Spark task offers its slot.",
        {"host": "int; number of the task", "slot": "int", "name": "str; the machine's"},
        None,
    ),
    "host_facts": ("What that task found where it runs.", {"host": "int", "slot": "int", "facts": "object"}, None),
    "host_lost": ("A task has ended, or cannot be reached.", {"host": "int", "name": "str", "reason": "str"}, None),
    "host_draining": ("The host goes away soon, or is no longer listed.", {"host": "int", "name": "str"}, None),
    "host_listed_again": ("The discovery script lists it again.", {"host": "int", "name": "str"}, None),
    "slot_given_up": (
        "Spark has given up the task of a slot before it had registered; it is submitted again.",
        {"slot": "int", "reason": "str"},
        None,
    ),
    "slots_yielded": ("Too few to begin: the slots were given back for a while.", {"hosts": "int"}, None),
    "worker_starting": ("A worker is to be started.", {"worker": "int", "host": "int", "name": "str"}, None),
    "worker_started": ("Its process runs.", {"worker": "int", "host": "int", "pid": "int"}, None),
    "worker_ready": (
        "It stands at the elastic function.",
        {
            "worker": "int",
            "generation": "int; the last world that it was a member of, 0 for none",
            "commit": "str; the newest that it holds, generation.index, or None",
        },
        None,
    ),
    "worker_lost": (
        "It is out of the job.",
        {"worker": "int", "rank": "int or null", "host": "str; the machine's name", "cause": "str"},
        None,
    ),
    "worker_exited": (
        "Its process has ended.",
        {
            "worker": "int",
            "code": "int; minus the signal that killed it",
            "meaning": "str",
            "explains": "bool; whether this is why the worker was lost: no more than that had been known before",
        },
        None,
    ),
    "result_arrived": ("What it returned is here.", {"worker": "int"}, None),
    "world_forming": (
        "The members of a new generation connect.",
        {
            "generation": "int",
            "size": "int",
            "previous_size": "int; of the world that made the newest commit, 0 for none",
            "workers": "list; the members, in rank order",
            "newest_commit": "str; from which they go on, or None",
        },
        None,
    ),
    "world_formed": (
        "All of them have.",
        {"generation": "int", "size": "int", "seconds": "float; since they were asked to"},
        None,
    ),
    "world_broken": ("A failure ends the generation.", {"generation": "int", "reason": "str"}, None),
    "world_interrupted": (
        "It is to end at the next commit: workers arrive or leave.",
        {"generation": "int", "reason": "str"},
        None,
    ),
    "world_finished": ("All ranks have left the elastic function.", {"generation": "int", "size": "int"}, None),
    "state_lost": (
        "Nobody holds the state; it comes back from the durable checkpoint.",
        {"generation": "int", "reason": "str"},
        None,
    ),
    "newcomers_paused": (
        "Newcomers have made worlds fail; training goes on without them, and they are let in again after a pause.",
        {
            "host": "str or null; the machine whose newcomers wait, null for all",
            "failures": "int; in a row",
            "seconds": "float; how long they wait",
            "reason": "str",
        },
        None,
    ),
    "run_again": (
        "A fixed world has broken; its workers are ended, and all of the function runs again in new ones.",
        {"generation": "int"},
        None,
    ),
    "driver_paused": ("The driver itself stood still.", {"seconds": "float"}, None),
    "events_dropped": (
        "So many events are missing here: `on_event`, or the disk, took them more slowly than they came.",
        {"count": "int"},
        None,
    ),
    "fault_injected": (
        "A test's fault strikes.",
        {"worker": "int", "rank": "int or null", "fault": "int; its number"},
        None,
    ),
    "entered": (
        "A worker has the state and enters the user's function.",
        _FROM_WORKER,
        {
            "step": "int; commits made before",
            "idle": "float; seconds since its last commit, or since it entered before; missing for a newcomer",
        },
    ),
    "stepped": ("It has made its first commit of the generation.", _FROM_WORKER, {"step": "int"}),
    "progress": (
        "How far rank 0 is, at most twice a second. The last three only where the state has a loader.",
        _FROM_WORKER,
        {
            "step": "int; commits",
            "epoch": "int; from 0",
            "rows": "int; of the epoch, on all ranks",
            "rows_total": "int; of an epoch",
        },
    ),
    "metrics": ("What a worker gave to `state.report`.", _FROM_WORKER, {"step": "int", "…": "the metrics"}),
    "checkpoint_written": (
        "A commit is durable.",
        _FROM_WORKER,
        {"name": "str", "step": "int", "bytes": "int", "seconds": "float"},
    ),
    "checkpoint_failed": ("It could not be written.", _FROM_WORKER, {"name": "str", "step": "int", "error": "str"}),
    "checkpoint_restored": ("The job goes on from it.", _FROM_WORKER, {"name": "str", "step": "int"}),
    "checkpoint_damaged": ("It was skipped.", _FROM_WORKER, {"name": "str"}),
    "checkpoint_superseded": ("A later run has taken over; this one writes no more.", _FROM_WORKER, {"name": "str"}),
}


def fields_of(kind: str) -> set[str]:
    """The names of an event's own fields."""
    _, fields, values = EVENTS[kind]
    return set(fields) | (set() if values is None else {"values"})


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Read an event log. A last line that was cut off, by a driver that was killed, is passed over.

    Raises ``ValueError`` for what is no event log, or one of a later version.
    """
    events = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            version = event["version"]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) > 1:
                break
            raise ValueError(f"{path}, line {number}: not an event of spark_elastic: {line[:80]!r}") from error
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"{path} has version {version}, this spark_elastic reads up to {SCHEMA_VERSION}: upgrade it"
            )
        events.append(event)
    if not any(event["event"] == "job_started" for event in events):
        raise ValueError(f"{path} holds no run: it has no job_started event")
    return events


def choose_run(events: Iterable[dict[str, Any]], run_id: str | None = None) -> list[dict[str, Any]]:
    """The events of one run of a log to which several were appended; None: the last one. Raises ``ValueError``."""
    runs: dict[str, list[dict[str, Any]]] = {}
    present: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "job_started":
            present = runs[event["run_id"]] = []
        present.append(event)
    if run_id is None:
        return present
    if run_id not in runs:
        raise ValueError(f"there is no run {run_id!r} in this log, only {', '.join(runs)}")
    return runs[run_id]


def document() -> str:
    """The schema as Markdown."""
    parts = [
        "# The event log\n\n"
        "`run(event_log=path)` appends one JSON object a line, `run(on_event=call)` calls with the same as dicts. Made from\n"
        "`spark_elastic/timeline/schema.py`; within a version events and fields are added, none is changed or removed.\n\n"
        "Every event has:\n\n",
        _listed(COMMON),
    ]
    for kind, (meaning, fields, values) in EVENTS.items():
        parts.append(f"\n## {kind}\n\n{meaning}\n\n{_listed(fields)}")
        if values is not None:
            parts.append(f"- `values`: object\n{_listed(values, indent='    ')}")
    return "".join(parts)


def _listed(fields: dict[str, str], indent: str = "") -> str:
    return "".join(f"{indent}- `{name}`: {meaning}\n" for name, meaning in fields.items())


if __name__ == "__main__":
    print(document(), end="")
