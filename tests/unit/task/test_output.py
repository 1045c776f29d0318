"""What a worker prints arrives in lines as a terminal would show them, cut between characters, and the end of it, too."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Any

import pytest

from spark_elastic.protocol.messages import OutputLines, Stream
from spark_elastic.task.output import LINE_LIMIT, OutputForwarder


class Connection:
    crowded = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send(self, message: OutputLines) -> None:
        self.lines += message.lines


def forwarded(*written: bytes) -> list[str]:
    """What is forwarded of writes that are read one by one."""

    async def forward() -> list[str]:
        connection: Any = Connection()
        forwarder = OutputForwarder(0, Stream.OUT, connection, deque(maxlen=3), lambda: None)
        forwarder.start()
        for data in written:
            os.write(forwarder.write_end, data)
            forwarder._readable()
        os.close(forwarder.write_end)
        forwarder.close()
        lines: list[str] = connection.lines
        return lines

    return asyncio.run(forward())


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ([b"one\ntw", b"o\n\nthree"], ["one", "two", "", "three"]),
        ([b"one\r\ntwo\r", b"\n"], ["one", "two"]),
        (["\r 10%|█  |\r 50%|██ |".encode(), "\r100%|███|\ndone\n".encode()], ["100%|███|", "done"]),
        ([b"50%\r", b"100%\r", b"\n"], ["100%"]),
        ([b"\r 50%"], [" 50%"]),
        ([b"100%\r"], ["100%"]),
    ],
)
def test_lines_are_what_a_terminal_shows_of_them(written: list[bytes], lines: list[str]) -> None:
    assert forwarded(*written) == lines


def test_a_progress_bar_does_not_become_many_lines_however_long_it_runs() -> None:
    bar = "".join(f"\r{step:6}|{'█' * 40}|" for step in range(1000)).encode()
    assert forwarded(*(bar[start : start + 999] for start in range(0, len(bar), 999))) == [f"{999:6}|{'█' * 40}|"]


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("offset", range(4))
def test_a_long_line_is_cut_between_two_characters(offset: int, end: bytes) -> None:
    text = "x" * offset + "𝄞" * LINE_LIMIT
    lines = forwarded(
        *(text.encode()[start : start + 5000] for start in range(0, len(text.encode()), 5000)), *([end] if end else [])
    )
    assert "".join(lines) == text
    assert 4 <= len(lines) <= 5
    assert all(len(line.encode()) <= LINE_LIMIT for line in lines)


def test_bytes_that_are_no_text_are_cut_all_the_same() -> None:
    assert len(forwarded(b"\x80" * (2 * LINE_LIMIT) + b"\n")) == 3
