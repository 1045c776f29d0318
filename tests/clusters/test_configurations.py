"""Settings of Spark's that change how Python and tasks are run: under each, a worker and an executor are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyspark
import pytest
from reports import Worker, newest_step, wait_for, wait_for_world

SPARK_HOME = Path(pyspark.__file__).parent
JOB = Path(__file__).parent / "configured_job.py"
WORKERS = 2

pytestmark = pytest.mark.long


class Submitted:
    """The job on a local cluster of two executors with the given settings."""

    def __init__(self, folder: Path, settings: dict[str, str], prefix: Sequence[str] = ()) -> None:
        self.folder = folder
        cores = int(settings.get("spark.task.cpus", "1"))
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", f"local-cluster[{WORKERS},{cores},1024]"]
        for name, value in {"spark.ui.enabled": "false", **settings}.items():
            command += ["--conf", f"{name}={value}"]
        environment = {**os.environ, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1"}
        environment |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        with open(folder / "submit.log", "w") as log:
            self.process = subprocess.Popen(
                [*prefix, *command, str(JOB), str(folder), str(WORKERS)],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def world(self, after: int = 0) -> list[Worker]:
        return wait_for_world(self.folder, WORKERS, after)

    def end(self) -> list[dict[str, float]]:
        """Let training end, and return what workers say that they have done."""
        (self.folder / "stop").touch()
        assert self.process.wait(200) == 0, (self.folder / "submit.log").read_text()[-4000:]
        workers: list[dict[str, float]] = json.loads((self.folder / "result.json").read_text())["workers"]
        return workers


def in_full_memory_of_files() -> list[str]:
    """Begin of a command: what it runs finds ``/dev/shm`` full, as in a container with the default of 64 MB that is used up."""
    prefix = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("a full /dev/shm takes the right to mount")
    return prefix


@pytest.fixture
def submitted(nothing_left: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Submitted]:
    prefix = in_full_memory_of_files() if request.param is FULL_MEMORY_OF_FILES else []
    submitted = Submitted(tmp_path, request.param, prefix)
    yield submitted
    submitted.process.kill()
    submitted.process.wait()


FULL_MEMORY_OF_FILES: dict[str, str] = {}
CONFIGURATIONS = {
    "a full /dev/shm": FULL_MEMORY_OF_FILES,
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


@pytest.mark.parametrize("submitted", CONFIGURATIONS.values(), ids=CONFIGURATIONS, indirect=True)
def test_a_killed_worker_and_a_killed_executor_cost_no_committed_step(submitted: Submitted) -> None:
    first = submitted.world()
    os.kill(first[1].pid, signal.SIGKILL)
    second = submitted.world(after=first[0].generation)
    steps = newest_step(submitted.folder)
    os.kill(second[1].executor(), signal.SIGKILL)
    third = submitted.world(after=second[0].generation)
    assert third[0].pid == first[0].pid
    wait_for(lambda: newest_step(submitted.folder) > steps, "a further step")
    for worker in submitted.end():
        assert worker["counted"] == worker["steps"] > steps
