"""Reads event logs: a line, a whole file, or one run of a file that holds several."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from spark_elastic.protocol.event_format import read_event
from spark_elastic.protocol.records import Entry, JobStarted


def read_line(line: str) -> Entry:
    """Read one line of an event log.

    Raises ``ValueError`` if the line is not an event: its subclass ``json.JSONDecodeError`` if the line is still being written.
    """
    return read_event(json.loads(line))


def read_events(path: str | Path) -> list[Entry]:
    """Read an event log. A last line that was cut off, because the driver was killed, is ignored.

    Raises ``ValueError`` if the file is not an event log, or has a later version.
    """
    entries = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entries.append(read_line(line))
        except json.JSONDecodeError as error:
            if number == len(lines) > 1:
                break
            raise ValueError(f"{path}, line {number}: not an event of spark_elastic: {line[:80]!r}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not any(isinstance(entry.record, JobStarted) for entry in entries):
        raise ValueError(f"{path} holds no run: it has no job_started event")
    return entries


def choose_run(entries: Iterable[Entry], run_id: str | None = None) -> list[Entry]:
    """Return the entries of one run in a log that may hold several, also at once; by default of the one begun last.

    Raises ``ValueError``. An entry that does not say its run, as those of earlier releases, belongs to the run begun last. One of
    a run whose beginning was lost is left out.
    """
    runs: dict[str, list[Entry]] = {}
    latest: list[Entry] = []
    for entry in entries:
        if isinstance(entry.record, JobStarted):
            latest = runs[entry.record.run_id] = []
        of_run = latest if entry.run is None or isinstance(entry.record, JobStarted) else runs.get(entry.run)
        if of_run is not None:
            of_run.append(entry)
    if run_id is None:
        return latest
    if run_id not in runs:
        raise ValueError(f"there is no run {run_id!r} in this log, only {', '.join(runs)}")
    return runs[run_id]
