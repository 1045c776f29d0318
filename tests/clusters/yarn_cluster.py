"""Starts the stand-in of a YARN cluster (``yarn/StandIn.java``), submits to it, tells it what is to happen, and ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pyspark
from reports import wait_for

SOURCES = Path(__file__).parent / "yarn"
SPARK_HOME = Path(pyspark.__file__).parent
# Of our environment, what containers get.
INHERITED = ("PATH", "TMPDIR", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "SPARK_ELASTIC_TEST_RUN")
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.yarn.jars": f"local:{SPARK_HOME}/jars/*",
    "spark.yarn.scheduler.heartbeat.interval-ms": "500",
    "spark.driver.memory": "512m",
    "spark.driver.memoryOverhead": "1g",
    "spark.yarn.am.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "1g",
    "spark.decommission.enabled": "true",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.timeout": "5s",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
    "spark.dynamicAllocation.maxExecutors": "8",
    "spark.sql.shuffle.partitions": "2",
}


def compile_stand_in(folder: Path) -> Path:
    """Compile it with the Hadoop classes that pyspark ships; return where the classes are."""
    classes = folder / "classes"
    command = ["javac", "-J-XX:TieredStopAtLevel=1", "-cp", f"{SPARK_HOME}/jars/*", "-d", str(classes)]
    subprocess.run([*command, *map(str, SOURCES.glob("*.java"))], check=True)
    return classes


@dataclass(frozen=True)
class Container:
    id: str
    host: str
    application: str
    is_master: bool
    pid: int
    has_ended: bool
    code: int
    folder: Path
    diagnostics: str


@dataclass(frozen=True)
class Application:
    """``most_wanted``: containers that it had and asked for, at most at a time. ``released``: those that it gave back."""

    id: str
    state: str
    end: str
    attempt: int
    most_wanted: int
    released: int


class Yarn:
    """A cluster of nodes at 127.0.0.2, .3, and so on. A context manager: on exit all that it has started is ended."""

    def __init__(self, classes: Path, folder: Path, nodes: int = 2, memory: int = 10_000, cores: int = 8) -> None:
        self.folder = folder
        self._command = ["java", "-Xmx256m", "-cp", f"{classes}:{SPARK_HOME}/jars/*", "StandIn", str(folder)]
        self._command += [str(nodes), str(memory), str(cores), *INHERITED]
        self._submitted: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Yarn:
        with open(self.folder / "yarn.log", "w") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        control = self.folder / "control"
        wait_for(lambda: control.exists() or self._process.poll() is not None, "the stand-in")
        assert control.exists(), (self.folder / "yarn.log").read_text()
        self._address = control.read_text()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._submitted:
            process.kill()
            process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if error is not None:
            print((self.folder / "yarn.log").read_text())

    def submit(
        self,
        script: Path,
        *arguments: str,
        mode: str = "client",
        python: str = sys.executable,
        options: tuple[str, ...] = (),
        settings: dict[str, Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run spark-submit; what it says goes to ``submit.log``."""
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "yarn", "--deploy-mode", mode]
        staging = {"spark.yarn.stagingDir": (self.folder / "staging").as_uri()}
        for name, value in {**SETTINGS, **staging, **(settings or {})}.items():
            command += ["--conf", f"{name}={value}"]
        environment = {
            **os.environ,
            "SPARK_HOME": str(SPARK_HOME),
            "HADOOP_CONF_DIR": str(self.folder / "conf"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": python,
        }
        with open(self.folder / "submit.log", "a") as log:
            process = subprocess.Popen(
                [*command, *options, str(script), *arguments], env=environment, stdout=log, stderr=log
            )
        self._submitted.append(process)
        return process

    def containers(self) -> list[Container]:
        found = []
        for line in self._ask("containers").splitlines():
            name, host, application, kind, pid, ended, code, folder, diagnostics = line.split("\t")
            ending = (ended == "true", int(code), Path(folder), diagnostics)
            found.append(Container(name, host, application, kind == "master", int(pid), *ending))
        return found

    def executors(self) -> list[Container]:
        """Return those that run."""
        return [one for one in self.containers() if not one.is_master and not one.has_ended]

    def applications(self) -> list[Application]:
        found = []
        for line in self._ask("applications").splitlines():
            name, state, end, *numbers = line.split("\t")
            found.append(Application(name, state, end, *map(int, numbers)))
        return found

    def ended(self) -> Application:
        """Wait for the end of the only application: its master may end after spark-submit has, once it has unregistered."""
        wait_for(lambda: [one.state for one in self.applications()] == ["FINISHED"], "the end of the application")
        (application,) = self.applications()
        return application

    def preempt(self, container: Container) -> None:
        self._ask("preempt", container=container.id)

    def decommission(self, host: str, seconds: float) -> None:
        """Have a node drained: masters are told now, and what is left of its containers is killed then."""
        self._ask("decommission", node=host, ms=int(1000 * seconds))

    def recommission(self, host: str) -> None:
        self._ask("recommission", node=host)

    def lose(self, host: str, seconds: float) -> None:
        """Have a machine die; the resource manager finds out after so many seconds."""
        self._ask("lose", node=host, ms=int(1000 * seconds))

    def _ask(self, path: str, **query: Any) -> str:
        url = f"http://{self._address}/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())
