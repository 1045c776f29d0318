"""``configured_job.py``, submitted to a standalone Spark cluster, and what is done to its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyspark
import pytest
from reports import Worker, newest_step, wait_for, wait_for_world

SPARK_HOME = Path(pyspark.__file__).parent
JOB = Path(__file__).parent / "configured_job.py"
WORKERS = 2
END_SECONDS = 200.0


class Submitted:
    """The job, on a local cluster of two executors unless a master is given; ``end`` and ``kill`` end it.

    settings: Spark's. environment: variables of the driver's and, on a local cluster, of the executors' besides those of this
    process. given: arguments of ``run``. prefix: the begin of the command.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        given: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        master: str | None = None,
    ) -> None:
        self.folder = folder
        settings = {"spark.ui.enabled": "false", **(settings or {})}
        cores = int(settings.get("spark.task.cpus", "1"))
        master = master or f"local-cluster[{WORKERS},{cores},1024]"
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", master]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        sparks = {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1"}
        pythons = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        arguments = [f"{name}={json.dumps(value)}" for name, value in (given or {}).items()]
        with open(folder / "submit.log", "w") as log:
            self.process = subprocess.Popen(
                [*prefix, *command, str(JOB), str(folder), str(WORKERS), *arguments],
                env={**os.environ, **sparks, **pythons, **(environment or {})},
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def log(self) -> str:
        return (self.folder / "submit.log").read_text()

    def world(self, after: int = 0) -> list[Worker]:
        return wait_for_world(self.folder, WORKERS, after, self.process)

    def strike(self) -> None:
        """Kill a worker, then an executor. The other worker goes on, and no committed step is lost: ``end`` looks at that."""
        first = self.world()
        os.kill(first[1].pid, signal.SIGKILL)
        second = self.world(after=first[0].generation)
        steps = newest_step(self.folder)
        os.kill(second[1].executor(), signal.SIGKILL)
        third = self.world(after=second[0].generation)
        assert third[0].pid == first[0].pid
        wait_for(lambda: newest_step(self.folder) > steps, "a further step")

    def end(self) -> None:
        """Let training end. Every step that was made has to have counted once, on every worker."""
        steps = newest_step(self.folder)
        (self.folder / "stop").touch()
        assert self.process.wait(END_SECONDS) == 0, self.log()[-4000:]
        for worker in json.loads((self.folder / "result.json").read_text())["workers"]:
            assert worker["counted"] == worker["steps"] >= steps

    def fail(self) -> str:
        """Wait until the job has failed by itself; return what it has said."""
        assert self.process.wait(END_SECONDS) != 0, self.log()[-4000:]
        return self.log()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def unshared(kind: str, script: str) -> list[str]:
    """Return the begin of a command that runs in a namespace of its own, which a line of shell has changed before."""
    prefix = ["unshare", f"--{kind}", "sh", "-c", f'{script} && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"takes the right to have a {kind} namespace, and to change it: {script}")
    return prefix
