"""LogFollower: reads an event log while it grows, and skips lines that are not our events."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from spark_elastic.protocol.records import Entry, JobStarted
from spark_elastic.protocol.reports import Metrics
from spark_elastic.timeline.event_log import choose_run, read_line

READ_BYTES = 2**20
# None of our events is longer. A longer line must not fill the memory: it is counted, but not kept.
LINE_LIMIT = 16 * 2**20
# This many bytes identify a log: its first event has the time and, soon after, the run.
HEAD_BYTES = 256


@dataclass(frozen=True)
class Unread:
    """How many lines of a log are not events that this release can read, and what is wrong with the first of them."""

    count: int = 0
    first: str = ""

    def __str__(self) -> str:
        lines = "1 line" if self.count == 1 else f"{self.count:,} lines"
        return f"{lines} of the log could not be read; the first: {self.first}"


ALL_READ = Unread()


@dataclass
class LogFollower:
    """Reads what has been written to an event log since the last read. The file need not exist yet.

    A log that was replaced, has become shorter, or begins differently is read from the beginning again. A last line without a
    line end waits: it is still being written, or was when the driver was killed.
    """

    path: Path
    entries: list[Entry] = field(default_factory=list)
    unread: Unread = ALL_READ
    _identity: tuple[int, int] | None = None
    _head: bytes = b""
    _offset: int = 0
    _line: int = 0
    _rest: bytes = b""
    _skips: bool = False

    def read(self) -> bool:
        """Read further; return whether the file exists. Raises ``OSError`` if it is unreadable or not a regular file."""
        try:
            file = open(self.path, "rb", opener=_open_at_once)  # noqa: SIM115
        except FileNotFoundError:
            self._begin_again(None)
            return False
        with file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(self.path))
            head = file.read(HEAD_BYTES)
            identity = (facts.st_dev, facts.st_ino)
            # A new file in place of a deleted one may get the same inode, and a file may be overwritten in place.
            if identity != self._identity or facts.st_size < self._offset or not head.startswith(self._head):
                self._begin_again(identity)
            self._head = head
            file.seek(self._offset)
            while data := file.read(READ_BYTES):
                self._offset += len(data)
                for line in self._lines(data):
                    self._take(line)
        return True

    def take_rest(self) -> None:
        """Also take a last line without a line end, if it is an event: tools that rewrite files may leave out that end."""
        with contextlib.suppress(ValueError, RecursionError):  # a line that is still being written
            self._add(read_line(self._rest.decode("utf-8")))

    @property
    def place(self) -> tuple[object, ...]:
        """The file and the position in it. A different value means that there is something new."""
        return self._identity, self._head, self._offset

    def run(self, run_id: str | None = None) -> list[Entry]:
        """Return the entries of one run, by default the last; an empty list if it has not begun."""
        known = [entry.record.run_id for entry in self.entries if isinstance(entry.record, JobStarted)]
        if not known or (run_id is not None and run_id not in known):
            return []
        of_run = choose_run(self.entries, run_id)
        begins = next(place for place, entry in enumerate(of_run) if isinstance(entry.record, JobStarted))
        return of_run[begins:]

    def _begin_again(self, identity: tuple[int, int] | None) -> None:
        self.entries, self.unread = [], ALL_READ
        self._identity, self._head, self._offset = identity, b"", 0
        self._line, self._rest, self._skips = 0, b"", False

    def _lines(self, data: bytes) -> Iterator[bytes | None]:
        """Yield the lines that are complete by now, and None for a line that was too long."""
        *whole, rest = data.split(b"\n")
        for part in whole:
            yield None if self._skips or len(self._rest) + len(part) > LINE_LIMIT else self._rest + part
            self._rest, self._skips = b"", False
        self._rest += b"" if self._skips else rest
        if len(self._rest) > LINE_LIMIT:
            self._rest, self._skips = b"", True

    def _take(self, line: bytes | None) -> None:
        self._line += 1
        if line is None:
            self._pass_over(f"it is longer than {LINE_LIMIT // 2**20} MiB")
            return
        if not line.strip():
            return
        try:
            self._add(read_line(line.decode("utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            self._pass_over(f"not an event of spark_elastic: {line[:80].decode('utf-8', 'replace')!r}")
        except ValueError as error:
            self._pass_over(str(error))

    def _add(self, entry: Entry) -> None:
        if not is_sound(entry.time) or not is_sound(entry.record):
            raise ValueError("no event of spark_elastic: a number in it is too large, or none")
        self.entries.append(entry)

    def _pass_over(self, why: str) -> None:
        self.unread = Unread(self.unread.count + 1, self.unread.first or f"line {self._line}: {why}")


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking; opening a FIFO would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def is_sound(value: object) -> bool:
    """Whether no number of a record is huge or NaN. Metrics may hold any number: a loss may be NaN."""
    if isinstance(value, (int, float)):
        return abs(value) < 2**63
    if isinstance(value, msgspec.Struct):
        return isinstance(value, Metrics) or all(map(is_sound, msgspec.structs.astuple(value)))
    if isinstance(value, (list, tuple)):
        return all(map(is_sound, value))
    return True


def read_run(path: str | Path, run_id: str | None = None) -> tuple[list[Entry], Unread]:
    """Read one run of a log, by default the last, and report the lines that had to be skipped.

    Raises ``ValueError`` if the file holds no run, or not this one, and ``OSError`` if it cannot be read.
    """
    follower = LogFollower(Path(path))
    if not follower.read():
        raise FileNotFoundError(f"there is no file {path}")
    follower.take_rest()
    if not follower.run():
        why = f": {follower.unread.first}" if follower.unread.count else ": it has no job_started event"
        raise ValueError(f"{path} holds no run{why}")
    return follower.run(run_id) or choose_run(follower.entries, run_id), follower.unread
