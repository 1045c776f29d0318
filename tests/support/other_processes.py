"""Processes that tests start: waiting for what they do, for their end, and for the end of what they have started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

GONE_SECONDS = 30.0
START_SECONDS = 200.0


def wait_until(
    condition: Callable[[], bool],
    what: str,
    process: subprocess.Popen[str] | None = None,
    seconds: float = START_SECONDS,
) -> None:
    """Wait for what another process does. Its end, or that of ``seconds``, fails the test."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.05)


def wait_for(path: Path, seconds: float = START_SECONDS) -> list[int]:
    """Wait until a worker has written its pids: worker, warm parent, sleeper, DataLoader workers."""
    wait_until(path.exists, f"{path} was to be written", seconds=seconds)
    return [int(pid) for pid in path.read_text().split()]


def alive(pids: list[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def assert_gone(pids: list[int]) -> None:
    _, left = psutil.wait_procs(alive(pids), timeout=GONE_SECONDS)
    assert not left, [(process.pid, process.cmdline()) for process in left]


def finish(process: subprocess.Popen[str], seconds: float = 280.0) -> str:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err[-3000:]
    return out
