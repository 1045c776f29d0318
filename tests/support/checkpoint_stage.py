"""Checkpoint directories on a disk and in an object store in memory, and stores that fail when told to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from spark_elastic.checkpoint.directory import CheckpointDirectory

SECRET_URL = "memory://AK:S3/CRET@bucket/x?secret_key=S3CRET"


def memory_url() -> str:
    """The URL of an empty object store: it knows no directories, and lists what was written."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    return "memory://bucket/job"


def fill(name: Any, directory: CheckpointDirectory, content: bytes = b"content") -> None:
    directory.write(name, {"a.bin": [content[:3], content[3:]], "b.bin": [b""]})


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut short": lambda path: damage(path, lambda data: data[:-1]),
    "flipped": lambda path: damage(path, lambda data: bytes([data[0] ^ 1]) + data[1:]),
}
