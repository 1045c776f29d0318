"""A real standalone master, with workers of one core as they are added."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pyspark

from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE


class Standalone:
    """Listens on a port of its own. ``end`` kills all that was started."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._home = Path(pyspark.__file__).parent
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        port = str(free_port(host))
        self.url = f"spark://{host}:{port}"
        self._start(host, [], "master.Master", "--port", port)

    def add_worker(
        self, host: str = "127.0.0.1", *, prefix: list[str] | None = None, gpu: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start a worker, its command behind ``prefix``; its executor ends with it. It finds a GPU with the address ``gpu``."""
        folder = self._folder / f"worker{len(self._processes)}"
        options = self._invented(gpu) if gpu else ""
        arguments = ["--cores", "1", "-m", "1g", "-d", str(folder), self.url]
        return self._start(host, prefix or [], "worker.Worker", *arguments, options=options)

    def _invented(self, gpu: str) -> str:
        """Return the settings of a worker whose discovery script finds this GPU."""
        script = self._folder / f"gpu{len(self._processes)}"
        script.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": ["{gpu}"]}}\'\n')
        script.chmod(0o755)
        return f" -Dspark.worker.resource.gpu.amount=1 -Dspark.worker.resource.gpu.discoveryScript={script}"

    def _start(
        self, host: str, prefix: list[str], name: str, *arguments: str, options: str = ""
    ) -> subprocess.Popen[bytes]:
        spark_class = str(self._home / "bin" / "spark-class")
        command = [*prefix, spark_class, f"org.apache.spark.deploy.{name}", "--host", host, "--webui-port", "0"]
        environment = {
            **os.environ,
            "SPARK_HOME": str(self._home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": host,
            # Else a worker that is to be decommissioned (SIGPWR) ends at once.
            "SPARK_WORKER_OPTS": "-Dspark.decommission.enabled=true" + options,
            # Else the master gives an application up whose executors die again and again.
            "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
        }
        with open(self._folder / "standalone.log", "a") as log:
            self._processes.append(subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log))
        return self._processes[-1]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def executor_of(worker: int) -> psutil.Process:
    """The executor's JVM that the process of a worker, or of a driver in a slot, belongs to."""
    process = psutil.Process(worker)
    if (pid := process.environ().get(EXECUTOR_VARIABLE)) is not None:
        return psutil.Process(int(pid))
    return next(parent for parent in process.parents() if parent.name().startswith("java"))


def free_port(host: str = "127.0.0.1") -> int:
    """Find a port below those that Linux gives to whoever asks for any, so that nobody is given it before it is used."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
