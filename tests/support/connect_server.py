"""A real Spark Connect server on a local-cluster of executor JVMs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyspark
from standalone import free_port

START_SECONDS = 120.0


class ConnectServer:
    """Serves at ``url`` once it is made. ``end`` kills it, and its executors end with it, which run ``python``."""

    def __init__(self, folder: Path, executors: int, python: str = sys.executable) -> None:
        home = Path(pyspark.__file__).parent
        port = free_port()
        self.url = f"sc://127.0.0.1:{port}"
        settings = {
            "spark.decommission.enabled": "true",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": port,
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.shuffle.partitions": 2,
            "spark.ui.enabled": "false",
        }
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": python,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        with open(folder / "connect.log", "w") as log:
            self._process = subprocess.Popen(
                [
                    str(home / "bin" / "spark-submit"),
                    "--class",
                    "org.apache.spark.sql.connect.service.SparkConnectServer",
                    "--master",
                    f"local-cluster[{executors},1,1024]",
                    *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
                    "spark-internal",
                ],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while port not in {entry.laddr.port for entry in self._connections() if entry.status == psutil.CONN_LISTEN}:
            assert self._process.poll() is None, (folder / "connect.log").read_text()
            assert time.monotonic() < deadline, (folder / "connect.log").read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.kill()
        self._process.wait()

    def _connections(self) -> list[psutil._ntuples.pconn]:
        return psutil.Process(self._process.pid).net_connections()
