"""A driver in a slot ends with its executor."""

from __future__ import annotations

import subprocess
import sys

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
