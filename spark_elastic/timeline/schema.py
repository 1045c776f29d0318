"""Documents the format of event logs: ``python -m spark_elastic.timeline.schema > docs/events.md``."""

from __future__ import annotations

import inspect
from types import UnionType
from typing import get_args, get_origin

import msgspec

from spark_elastic.protocol import records, reports

_INTRODUCTION = """# The event log

`run(event_log=path)` appends one JSON object a line, `run(on_event=call)` calls with the same as dicts, once they are in the
file. Made from `spark_elastic/protocol/records.py` and `reports.py`; within a version events and fields are added, none is
changed or removed.

Every event has:

- `version`: int; of this schema
- `time`: float; seconds since 1970, of the driver's clock
- `event`: str; one of those below
- `run`: str; the `run_id` of the run that it belongs to

So that the log of a large or long job grows slowly, `worker_sampled` is written for each worker every five seconds at most, for
more than twenty workers four times a second for all of them together, and for a worker that has run for more than eight minutes
once in a hundredth of the time that it has run. What it has printed meanwhile waits for the next one.
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
