"""What the workers of a submitted script say about themselves, read by the test that disturbs them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from standalone import executor_of

WAIT_SECONDS = 300.0

T = TypeVar("T")


@dataclass(frozen=True)
class Worker:
    """Where a worker was when it last made a step."""

    pid: int
    generation: int
    rank: int
    size: int

    def executor(self) -> int:
        """Return the process of the executor's JVM that the worker belongs to."""
        return int(executor_of(self.pid).pid)


def workers(folder: Path) -> list[Worker]:
    """Return those that live, by rank."""
    found = [
        Worker(int(file.name), *map(int, file.read_text().split()))
        for file in (folder / "workers").glob("*")
        if file.name.isdigit() and is_alive(int(file.name))
    ]
    return sorted(found, key=lambda worker: worker.rank)


def events(folder: Path) -> list[dict[str, Any]]:
    """Return those of ``events.jsonl``, of which the last may just be written."""
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kinds(of: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in of]


def newest_step(folder: Path) -> int:
    """Return how many commits rank 0 has last told of."""
    return max((event["values"]["step"] for event in events(folder) if event["event"] == "progress"), default=0)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_world(
    folder: Path, size: int, after: int = 0, driver: subprocess.Popen[bytes] | None = None
) -> list[Worker]:
    """Wait until a world of this size, of a generation after the given one, makes steps; return its members by rank.

    driver: who must not end meanwhile.
    """

    def whole() -> list[Worker]:
        assert driver is None or driver.poll() is None, "the driver has ended"
        alive = workers(folder)
        newest = max((worker.generation for worker in alive), default=0)
        members = [worker for worker in alive if worker.generation == newest]
        is_whole = newest > after and len(members) == size and all(member.size == size for member in members)
        return members if is_whole else []

    return wait_for(whole, f"a world of {size} after generation {after}")


def wait_for(look: Callable[[], T], what: str, seconds: float = WAIT_SECONDS) -> T:
    """Look until there is something to see, and return it."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)
    return seen
