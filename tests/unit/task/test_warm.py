"""A warm parent in a fresh interpreter: its connection, and its end."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_processes import wait_until

from spark_elastic.task.warm import StartedParent


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StartedParent, list[str], dict[str, Any]]]:
    """A parent that is a process which waits, and how it was to be started."""
    start, calls = subprocess.Popen, list[tuple[list[str], dict[str, Any]]]()

    def wait_instead(command: list[str], **of: Any) -> subprocess.Popen[bytes]:
        calls.append((command, of))
        return start(["sleep", "1000"], **of)

    monkeypatch.setattr(subprocess, "Popen", wait_instead)
    parent = StartedParent({"PATH": os.environ["PATH"], "GREETING": "hello"})
    yield parent, *calls[0]
    parent.kill()
    parent.wait()
    parent.connection.close()


def test_it_gets_the_other_end_of_the_connection_the_tasks_number_and_the_workers_environment(
    started: tuple[StartedParent, list[str], dict[str, Any]],
) -> None:
    parent, command, of = started
    assert command[-2:] == [str(of["pass_fds"][0]), str(os.getpid())]
    environment = Path(f"/proc/{parent.pid}/environ")
    wait_until(lambda: bool(environment.read_text()), "the program, without which the kernel shows no environment")
    assert "GREETING=hello" in environment.read_text().split("\0")
    assert os.getsid(parent.pid) == parent.pid, "signals for the task's terminal do not reach it"
    assert os.readlink(f"/proc/{parent.pid}/fd/{command[-2]}").startswith("socket:")
    assert parent.connection.type == socket.SOCK_SEQPACKET


def test_it_is_waited_for_as_long_as_one_likes(started: tuple[StartedParent, list[str], dict[str, Any]]) -> None:
    parent, _, _ = started
    assert not parent.wait(0.01)
    parent.kill()
    assert parent.wait(30.0)
    assert parent.wait()
    assert parent.connection.recv(1) == b"", "the connection shows the end, too"
