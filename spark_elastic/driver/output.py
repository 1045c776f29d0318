"""OutputPrinter: shows in the driver's output what workers print, each line with its rank, and the job's own log lines."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TextIO

from spark_elastic.protocol.messages import Stream

logger = logging.getLogger("spark_elastic")

# How many messages may wait to be printed. Each holds what a worker wrote at once, at most a few hundred kilobytes.
BACKLOG = 64
END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Page:
    stream: Stream
    prefix: str
    lines: tuple[str, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class _LogLine:
    level: int
    text: str


class OutputPrinter:
    """Prints from a thread of its own, from ``__enter__`` to ``__exit__``.

    A blocked terminal, pager or pipe must not hold up the job, so lines that find the backlog full are only counted. Each write
    happens inside ``aside(stream)``, which wipes whatever else is drawn there.
    """

    def __init__(self, aside: Callable[[TextIO], AbstractContextManager[object]] = nullcontext) -> None:
        self._aside = aside
        self._pages: queue.Queue[_Page | _LogLine | None] = queue.Queue(BACKLOG)
        self._dropped: dict[tuple[Stream, str], int] = {}
        self._printed = 0
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="spark_elastic-output", daemon=True)

    def __enter__(self) -> OutputPrinter:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Print what waits, or give up after ``END_SECONDS`` in which no output was taken."""
        counts = [_Page(stream, prefix, (), dropped) for (stream, prefix), dropped in self._dropped.items()]
        try:
            for page in [*counts, None]:
                self._pages.put(page, timeout=END_SECONDS)
        except queue.Full:
            self._abandoned = True
        before = -1
        while self._thread.is_alive() and self._printed > before:
            before = self._printed
            self._thread.join(timeout=END_SECONDS)

    def show(self, stream: Stream, prefix: str, lines: tuple[str, ...], dropped: int = 0, wait: float = 0.0) -> None:
        """Have lines printed, and how many were dropped before them. Blocks for at most ``wait`` seconds. Not thread-safe."""
        dropped += self._dropped.pop((stream, prefix), 0)
        try:
            self._pages.put(_Page(stream, prefix, lines, dropped), block=wait > 0.0, timeout=wait or None)
        except queue.Full:
            self._dropped[stream, prefix] = dropped + len(lines)

    def log(self, level: int, text: str) -> None:
        """Have a line logged. Never blocks; the line is lost if the backlog is full."""
        try:
            self._pages.put_nowait(_LogLine(level, text))
        except queue.Full:
            pass

    def _run(self) -> None:
        while not self._abandoned and (page := self._pages.get()) is not None:
            self._print(page)
            self._printed += 1

    def _print(self, page: _Page | _LogLine) -> None:
        if isinstance(page, _LogLine):
            logger.log(page.level, page.text)
            return
        lines = [f"{page.prefix} … {page.dropped:,} lines dropped\n"] if page.dropped else []
        lines += [f"{page.prefix} {line}\n" for line in page.lines]
        self._write(sys.stdout if page.stream is Stream.OUT else sys.stderr, "".join(lines))

    def _write(self, target: TextIO, text: str) -> None:
        """Write to one of the driver's own streams. The job continues even if that fails."""
        try:
            with self._aside(target):
                _write(target, text)
        except (OSError, ValueError, AttributeError):
            pass  # the stream is closed, or there is none


def _write(target: TextIO, text: str) -> None:
    try:
        target.write(text)
    except UnicodeError:
        encoding = target.encoding or "ascii"
        target.write(text.encode(encoding, "replace").decode(encoding))
    target.flush()
