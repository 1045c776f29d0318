"""Converts records to events and back. An event is a dict of plain data: one line of the log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import msgspec

from spark_elastic.protocol.records import DRIVER_RECORDS, Entry, Record, Unknown, WorkerReported
from spark_elastic.protocol.reports import REPORTS, Metrics

SCHEMA_VERSION = 1
# How the values that JSON lacks are written.
_SPELLED = ("NaN", "Infinity", "-Infinity")


class _Head(msgspec.Struct, frozen=True):
    """The fields of every event."""

    version: int
    time: float
    event: str
    run: str | None = None


class _ReportFields(msgspec.Struct, frozen=True):
    """The additional fields of a report's event."""

    worker: int
    rank: int | None
    generation: int
    values: dict[str, object]


def as_event(entry: Entry) -> dict[str, object]:
    """Return the event for ``on_event``, made of plain data only."""
    head = {"version": SCHEMA_VERSION, "time": entry.time}
    return {**head, **_fields_of(entry.record), **({} if entry.run is None else {"run": entry.run})}


def as_line(event: Mapping[str, object]) -> str:
    """Return an event as a line of the log. JSON has no NaN and no infinity: these values become strings, such as ``"NaN"``."""
    try:
        return json.dumps(event, default=str, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_spelled(event), default=str, allow_nan=False) + "\n"


def _spelled(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _spelled(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _fields_of(record: Record) -> dict[str, object]:
    match record:
        case WorkerReported(worker, rank, generation, report):
            values: dict[str, object] = msgspec.to_builtins(report)
            kind = values.pop("event")
            if isinstance(report, Metrics):
                values = dict(report.values)
            return {"event": kind, "worker": worker, "rank": rank, "generation": generation, "values": values}
        case Unknown(kind, fields):
            return {"event": kind, **fields}
        case _:
            plain: dict[str, object] = msgspec.to_builtins(record)
            return plain


def read_event(event: Mapping[str, object]) -> Entry:
    """Read an event made by ``as_event`` of this or another release. Fields that this release does not know are ignored.

    Raises ``ValueError`` if this is not an event, or is one of a later version of the schema.
    """
    try:
        head = msgspec.convert(event, _Head)
        if head.version > SCHEMA_VERSION:
            raise ValueError(
                f"it has version {head.version}, this spark_elastic reads up to {SCHEMA_VERSION}: upgrade it"
            )
        if not math.isfinite(head.time):
            raise ValueError(f"no event of spark_elastic: its time is {head.time}")
        return Entry(head.time, _read_record(head.event, event), head.run)
    except msgspec.ValidationError as error:
        raise ValueError(f"no event of spark_elastic: {error}") from error


def _read_record(kind: str, event: Mapping[str, object]) -> Record:
    if kind in DRIVER_RECORDS:
        return msgspec.convert(event, DRIVER_RECORDS[kind])
    if kind in REPORTS:
        told = msgspec.convert(event, _ReportFields)
        values = {"values": _read_values(told.values)} if REPORTS[kind] is Metrics else told.values
        return WorkerReported(told.worker, told.rank, told.generation, msgspec.convert(values, REPORTS[kind]))
    return Unknown(kind, {name: value for name, value in event.items() if name not in _Head.__struct_fields__})


def _read_values(values: Mapping[str, object]) -> dict[str, object]:
    return {name: float(value) if value in _SPELLED else value for name, value in values.items()}
