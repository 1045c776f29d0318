"""Reads event logs, and documents their format: ``python -m spark_elastic.timeline.schema > docs/events.md``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

import msgspec

from spark_elastic.protocol import records, reports
from spark_elastic.protocol.event_format import read_event
from spark_elastic.protocol.records import Entry, JobStarted


def read_events(path: str | Path) -> list[Entry]:
    """Read an event log. A last line that was cut off, because the driver was killed, is ignored.

    Raises ``ValueError`` if the file is not an event log, or is one of a later version.
    """
    entries = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            if number == len(lines) > 1:
                break
            raise ValueError(f"{path}, line {number}: not an event of spark_elastic: {line[:80]!r}") from error
        try:
            entries.append(read_event(event))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not any(isinstance(entry.record, JobStarted) for entry in entries):
        raise ValueError(f"{path} holds no run: it has no job_started event")
    return entries


def choose_run(entries: Iterable[Entry], run_id: str | None = None) -> list[Entry]:
    """Return the entries of one run in a log that may hold several; by default the last. Raises ``ValueError``."""
    runs: dict[str, list[Entry]] = {}
    present: list[Entry] = []
    for entry in entries:
        if isinstance(entry.record, JobStarted):
            present = runs[entry.record.run_id] = []
        present.append(entry)
    if run_id is None:
        return present
    if run_id not in runs:
        raise ValueError(f"there is no run {run_id!r} in this log, only {', '.join(runs)}")
    return runs[run_id]


_INTRODUCTION = """# The event log

`run(event_log=path)` appends one JSON object a line, `run(on_event=call)` calls with the same as dicts. Made from
`spark_elastic/protocol/records.py` and `reports.py`; within a version events and fields are added, none is changed or removed.

Every event has:

- `version`: int; of this schema
- `time`: float; seconds since 1970, of the driver's clock
- `event`: str; one of those below
"""


def document() -> str:
    """Return the schema as Markdown, made from the classes of the records and their docstrings."""
    parts = [_INTRODUCTION]
    for kind, own in records.DRIVER_RECORDS.items():
        parts.append(f"\n## {kind}\n\n{_meaning(own)}\n\n{_fields(own)}")
    from_worker = _fields(records.WorkerReported, leave_out="report")
    for kind, report in reports.REPORTS.items():
        values = _fields(report) if report is reports.Metrics else f"- `values`: object\n{_fields(report, '    ')}"
        parts.append(f"\n## {kind}\n\n{_meaning(report)}\n\n{from_worker}{values}")
    return "".join(parts).replace("``", "`")


def _meaning(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0]


def _fields(kind: type, indent: str = "", leave_out: str = "") -> str:
    """List the fields of a class with their types and the text of the docstring's line ``name: text``."""
    _, _, rest = (inspect.getdoc(kind) or "").partition("\n\n")
    texts = dict(line.split(": ", 1) for line in rest.splitlines())
    lines = []
    for field in msgspec.structs.fields(kind):
        if field.name != leave_out:
            text = texts.pop(field.name, "")
            lines.append(f"{indent}- `{field.name}`: {_type(field)}{text and '; '}{text}\n")
    assert not texts, f"{kind.__name__} has no {', '.join(texts)}"
    return "".join(lines)


def _type(field: msgspec.structs.FieldInfo) -> str:
    """Name the JSON type of a field. For an optional field, this is its type when it is present."""
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    names = [_NAMES.get(get_origin(kind) or kind, "") for kind in kinds]
    return " or ".join(name for name in names if field.required or name != "null")


_NAMES = {int: "int", float: "float", str: "str", bool: "bool", list: "list", dict: "object", type(None): "null"}


if __name__ == "__main__":
    print(document(), end="")
