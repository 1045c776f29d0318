"""What differs from one cluster to the next: under each, a worker and an executor are killed, and no committed step is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from reports import events, newest_step, wait_for
from submitted import Submitted, unshared

pytestmark = pytest.mark.long

Submit = Callable[..., Submitted]

SETTINGS = {
    "no daemon of Python": {"spark.python.use.daemon": "false"},
    "a Python process for each task": {"spark.python.worker.reuse": "false"},
    "two cores a task": {"spark.task.cpus": "2"},
    "speculation": {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "50ms",
        "spark.speculation.task.duration.threshold": "2s",
    },
    "the reaper of tasks": {"spark.task.reaper.enabled": "true", "spark.task.reaper.killTimeout": "20s"},
    "fair scheduling": {"spark.scheduler.mode": "FAIR"},
    "encrypted connections": {
        "spark.authenticate": "true",
        "spark.authenticate.secret": "of this test",
        "spark.network.crypto.enabled": "true",
        "spark.io.encryption.enabled": "true",
    },
    "one failure of a task": {"spark.task.maxFailures": "1"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_killed_worker_and_a_killed_executor_cost_no_committed_step(submit: Submit, settings: dict[str, str]) -> None:
    job = submit(settings=settings)
    job.strike()
    job.end()


def test_memory_for_files_may_be_full(submit: Submit) -> None:
    """As in a container with the default of 64 MB that is used up."""
    job = submit(prefix=unshared("mount", "mount -t tmpfs -o size=4k none /dev/shm"))
    job.strike()
    job.end()


def test_disks_of_local_directories_may_be_full(submit: Submit, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    job = submit(
        prefix=unshared("mount", f"mount -t tmpfs -o size=16m none {disk}"),
        settings={"spark.local.dir": str(disk)},
        environment={"TMPDIR": str(disk), "SPARK_WORKER_DIR": str(tmp_path / "work")},
    )
    first = job.world()
    ballast = Path(f"/proc/{job.process.pid}/root{disk}/ballast")
    fill(ballast)
    assert shutil.disk_usage(ballast.parent).free == 0
    os.kill(first[1].pid, signal.SIGKILL)
    second = job.world(after=first[0].generation)
    os.kill(second[1].executor(), signal.SIGKILL)
    steps = newest_step(tmp_path) + 40
    wait_for(lambda: newest_step(tmp_path) > steps, "forty steps of the survivor")
    ballast.unlink()
    third = job.world(after=second[0].generation)
    assert third[0].pid == first[0].pid
    job.end()


def fill(path: Path) -> None:
    """Write to a file until its disk is full."""
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


JUMPING_CLOCK = """
import time

real = time.time
# To and fro by a year, each second.
time.time = lambda: real() + (1 if int(real()) % 2 else -1) * 365 * 86400
"""


def test_the_clock_may_jump(submit: Submit, tmp_path: Path) -> None:
    """Python's; tests/unit/test_clock.py and tests/unit/protocol/test_connection.py have what else asks for the time of day."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    job = submit(environment={"PYTHONPATH": str(tmp_path)})
    job.strike()
    job.end()
    times = [event["time"] for event in events(tmp_path)]
    assert max(times) - min(times) > 365 * 86400, "the clock did not jump"
