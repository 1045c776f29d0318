"""Forwards a worker's output: reads it at once, cuts it into bounded lines, and drops lines rather than wait."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator

from spark_elastic.protocol.connection import Connection
from spark_elastic.protocol.messages import OutputLines, Stream

LINE_LIMIT = 8 * 1024
READ_BYTES = 256 * 1024
LAST_LINES = 20


class OutputForwarder:
    """Reads one stream of a worker through a pipe. The pipe is always emptied, so that the worker never blocks on it.

    Of a line that is overwritten repeatedly, as progress bars are, only the last state is sent. A line longer than
    ``LINE_LIMIT`` is cut into several. While the connection to the driver is crowded, lines are counted instead of sent.
    """

    def __init__(
        self, worker: int, stream: Stream, connection: Connection, last_lines: deque[str], on_end: Callable[[], None]
    ) -> None:
        self._worker = worker
        self._stream = stream
        self._connection = connection
        self._last_lines = last_lines
        self._on_end = on_end
        self._rest = b""
        self._dropped = 0
        self._reading, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)

    @property
    def is_open(self) -> bool:
        """Whether more output may arrive."""
        return self._reading >= 0

    def start(self) -> None:
        """Begin to read, on the running event loop."""
        asyncio.get_running_loop().add_reader(self._reading, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._reading, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        *lines, self._rest = map(_last_state, (self._rest + data).split(b"\n"))
        *long, self._rest = _pieces(self._rest)
        self._forward([*(line.rstrip(b"\r") for line in lines), *long])

    def _forward(self, lines: list[bytes], last: bool = False) -> None:
        texts = [piece.decode("utf-8", "replace") for line in lines for piece in _pieces(line)]
        self._last_lines.extend(texts)
        if self._connection.crowded and not last:
            self._dropped += len(texts)
        elif texts or self._dropped:
            self._connection.send(OutputLines(self._worker, self._stream, tuple(texts), self._dropped))
            self._dropped = 0

    def close(self) -> None:
        """Forward what is left and close the pipe. A second call does nothing."""
        if self._reading < 0:
            return
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        self._reading = -1
        self._forward([self._rest.rstrip(b"\r")] if self._rest else [], last=True)
        self._rest = b""
        self._on_end()


def _last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line: the text after the last carriage return that has text after it."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _pieces(line: bytes) -> Iterator[bytes]:
    """Cut a long line, between two characters."""
    while len(line) > LINE_LIMIT:
        end = next(place for place in range(LINE_LIMIT, 0, -1) if line[place] & 0xC0 != 0x80 or place == LINE_LIMIT - 3)
        yield line[:end]
        line = line[end:]
    yield line
