"""An application on the stand-in, submitted as users submit theirs, and what its folder tells of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kube import Kubernetes
from kube.image import DIE_WITH_PARENT, SPARK_HOME

JOB = Path(__file__).parent / "training_job.py"
LOOK_SECONDS = 0.05
# A guard: with JVMs and imports of torch in what is waited for, a busy machine takes long.
WAIT_SECONDS = 250.0

SETTINGS = {
    "spark.kubernetes.container.image": "train:1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "1g",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.maxExecutors": "8",
    "spark.dynamicAllocation.executorIdleTimeout": "3s",
    "spark.kubernetes.allocation.batch.delay": "500ms",
    "spark.ui.enabled": "false",
}


@dataclass(frozen=True)
class World:
    """A generation, and its workers' processes by rank."""

    generation: int
    workers: dict[int, int]


class Application:
    """Submitted when made; ``end`` kills what is left of the submitter."""

    def __init__(
        self, cluster: Kubernetes, folder: Path, script: Path, *arguments: str, mode: str, settings: dict[str, str]
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        network = {
            "client": {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"},
            "cluster": {"spark.kubernetes.driver.master": cluster.url},
        }[mode]
        command = [
            *DIE_WITH_PARENT,
            str(SPARK_HOME / "bin" / "spark-submit"),
            "--master",
            f"k8s://{cluster.url}",
            "--deploy-mode",
            mode,
        ]
        for name, value in {**SETTINGS, **network, **settings}.items():
            command += ["--conf", f"{name}={value}"]
        command += [script.as_uri().replace("file:", "local:") if mode == "cluster" else str(script), *arguments]
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
            )  # fmt: skip

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait_for(self, condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
        """Wait until something can be read from the folder; return it."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, f"the application ended:\n{self.log()[-6000:]}"
            assert time.monotonic() < deadline, f"not after {seconds} s:\n{self.log()[-6000:]}"
            time.sleep(LOOK_SECONDS)
        return value

    def finish(self, seconds: float = WAIT_SECONDS) -> int:
        """Wait for the submitter's end; return its code."""
        return self.process.wait(seconds)


class Training(Application):
    """``training_job.py``."""

    def __init__(
        self, cluster: Kubernetes, folder: Path, mode: str = "client", conf: dict[str, str] | None = None, **given: Any
    ) -> None:
        arguments = [f"{name}={json.dumps(value)}" for name, value in given.items()]
        super().__init__(cluster, folder, JOB, str(folder), *arguments, mode=mode, settings=conf or {})

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = _lines(self.folder / "events")
        return [event for event in found if kind in (None, event["event"])]

    def steps(self) -> list[dict[str, Any]]:
        """What workers noted, in the order of time."""
        noted = [step for path in self.folder.glob("steps-*") for step in _lines(path)]
        return sorted(noted, key=lambda step: step["time"])

    def wait_for_size(self, size: int, *, after: int = 0) -> World:
        """Wait until all of a world of this size, later than the given generation, have stepped."""

        def look() -> dict[int, dict[int, int]] | None:
            worlds: dict[int, dict[int, int]] = {}
            for step in self.steps():
                if step["size"] == size and step["generation"] > after:
                    worlds.setdefault(step["generation"], {})[step["rank"]] = step["pid"]
            newest = max((step["generation"] for step in self.steps()), default=0)
            return {newest: worlds[newest]} if len(worlds.get(newest, {})) == size else None

        ((generation, workers),) = self.wait_for(look).items()
        return World(generation, workers)

    def wait_for_results(self) -> dict[str, Any]:
        path = self.folder / "results"
        self.wait_for(path.exists)
        return dict(json.loads(path.read_text()))

    def enough(self) -> list[dict[str, Any]]:
        """Have training end; return what workers returned, which is the same everywhere."""
        (self.folder / "enough").touch()
        results = self.wait_for_results()["results"]
        assert len({(result["step"], result["digest"]) for result in results}) == 1, results
        return list(results)

    def leave(self) -> int:
        (self.folder / "leave").touch()
        return self.finish()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines that are there by now."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
