"""The content of a checkpoint, value by value, to be hashed or compared with another."""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy
import torch

from spark_elastic._text import as_utf8
from spark_elastic.checkpoint.tree import OpaqueObject


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: its path, and bytes that no different value has."""

    path: str
    value: object
    kind: str
    data: bytes


def entries(value: object, path: str = "") -> Iterator[Entry]:
    """Yield the tensors, numbers and strings in a result of ``load_checkpoint``, in its order."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from entries(each, f"{path}.{_named(key)}" if path else _named(key))
    elif isinstance(value, (list, tuple)):
        yield Entry(path, value, type(value).__name__, str(len(value)).encode())
        for place, each in enumerate(value):
            yield from entries(each, f"{path}[{place}]")
    elif isinstance(value, (torch.Tensor, numpy.ndarray)):
        flat = _flat(value)
        data = flat.tobytes() if isinstance(flat, numpy.ndarray) else flat.view(torch.uint8).numpy().tobytes()
        yield Entry(path, value, f"{flat.dtype} {list(value.shape)}", data)
    elif isinstance(value, OpaqueObject):
        yield Entry(path, value, "object", repr(value).encode())
    else:
        yield Entry(path, value, type(value).__name__, repr(value).encode())


def _named(key: object) -> str:
    """Return a key as a part of a path. A string that reads like another key, such as "1", is quoted."""
    if not isinstance(key, str):
        return str(key)
    try:
        ast.literal_eval(key)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return key
    return repr(key)


def _flat(value: torch.Tensor | numpy.ndarray) -> torch.Tensor | numpy.ndarray:
    """Return the elements in one dimension: as a tensor, or as an array if torch does not have the dtype."""
    try:
        return torch.as_tensor(value).detach().contiguous().reshape(-1)
    except (TypeError, ValueError):
        return numpy.ascontiguousarray(value).reshape(-1)


@dataclass(frozen=True, slots=True)
class Digest:
    """The SHA-256 of a checkpoint's content, equal for equal bits.

    uncompared: the paths and types of the objects that only code could bring back, of which only the type counts.
    """

    sha256: str
    uncompared: tuple[str, ...]


def digest(objects: Mapping[str, object]) -> Digest:
    """Hash a checkpoint's content."""
    found, uncompared = hashlib.sha256(), []
    for entry in entries(objects):
        if isinstance(entry.value, OpaqueObject):
            uncompared.append(f"{entry.path} ({entry.value.kind})")
        for part in (as_utf8(entry.path).encode(), entry.kind.encode(), entry.data):
            found.update(len(part).to_bytes(8, "little") + part)
    return Digest(found.hexdigest(), tuple(uncompared))


def first_difference(one: Mapping[str, object], other: Mapping[str, object]) -> tuple[str, str] | None:
    """Return where two checkpoints first differ, and how; None if they have the same bits."""
    for mine, theirs in itertools.zip_longest(entries(one), entries(other)):
        if mine is None or theirs is None or mine.path != theirs.path:
            path = (mine or theirs).path
            return path, f"the one has {_name(mine)} here, the other {_name(theirs)}"
        if mine.kind != theirs.kind:
            return mine.path, f"{mine.kind} in the one, {theirs.kind} in the other"
        if mine.data != theirs.data:
            return mine.path, _describe(mine, theirs)
    return None


def _name(entry: Entry | None) -> str:
    return "nothing" if entry is None else entry.path


def _describe(one: Entry, other: Entry) -> str:
    if isinstance(one.value, (list, tuple)) and isinstance(other.value, (list, tuple)):
        return f"{len(one.value)} entries in the one, {len(other.value)} in the other"
    kinds = (torch.Tensor, numpy.ndarray)
    if not (isinstance(one.value, kinds) and isinstance(other.value, kinds)):
        return f"{one.value!r} in the one, {other.value!r} in the other"
    mine, theirs = _flat(one.value), _flat(other.value)
    bits = [numpy.frombuffer(entry.data, numpy.uint8).reshape(len(mine), -1) for entry in (one, other)]
    places = numpy.flatnonzero((bits[0] != bits[1]).any(1))
    first = int(places[0])
    return (
        f"{len(places)} of {len(mine)} elements, first number {first}: {mine[first].item()!r} in the one, "
        f"{theirs[first].item()!r} in the other"
    )
