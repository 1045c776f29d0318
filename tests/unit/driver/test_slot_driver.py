"""A driver in a slot ends with its executor, and has large results fetched before it returns the last of them."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.driver import slot_driver
from spark_elastic.driver.slot_driver import leave_for_client

SCRIPT = """
import subprocess, sys, time
from spark_elastic.driver import slot_driver
executor = subprocess.Popen(["sleep", "600"])
slot_driver.find_executor = lambda: executor.pid
with slot_driver.EndWithExecutor():
    print("driving", flush=True)
    if sys.argv[1] == "lost":
        executor.kill()
        time.sleep(600)
print("done", flush=True)
executor.kill()
"""


def play(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, end], capture_output=True, text=True, timeout=60, check=False)


def test_it_ends_at_once_when_its_executor_is_lost() -> None:
    lost = play("lost")
    assert (lost.returncode, lost.stdout) == (1, "driving\n"), lost.stderr


def test_the_process_goes_on_after_the_job_has_ended() -> None:
    done = play("done")
    assert (done.returncode, done.stdout) == (0, "driving\ndone\n"), done.stderr


class Post:
    """A post office with a letter of before, which is fetched, with all others, at the third look at it."""

    def __init__(self) -> None:
        self.letters = [b"of before"]
        self.fetched: list[list[bytes]] = []
        self.looks = 0
        self.emptied = SimpleNamespace(wait=self._wait)

    def put(self, letter: bytes) -> None:
        self.letters.append(letter)

    def _wait(self, seconds: float) -> bool:
        self.looks += bool(self.letters)
        if self.letters and self.looks % 3 == 0:
            self.fetched.append(self.letters)
            self.letters = []
        return not self.letters


@pytest.mark.parametrize(
    ("parts", "fetched", "returned"),
    [
        ([], [], []),
        ([b"12", b"34"], [], [b"12", b"34"]),  # no more than a task may return
        ([b"12", b"34", b"5", b"67", b"8"], [[b"of before"], [b"12", b"34"]], [b"5", b"67", b"8"]),
        ([b"12", b"34", b"567", b"8", b"9"], [[b"of before"], [b"12", b"34"], [b"567", b"8"]], [b"9"]),
    ],
)
def test_all_of_large_results_but_the_last_part_is_fetched_in_parts(
    parts: list[bytes], fetched: list[list[bytes]], returned: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_driver, "RESULT_BYTES", 4)
    post, left = Post(), deque(parts)
    given: Any = post
    pulses = list(leave_for_client(given, left))
    assert (post.fetched, list(left)) == (fetched, returned)
    assert len(pulses) == 2 * len(fetched), "Spark can stop the task while it waits"
