"""Hosts for chaos: standalone workers with networks of their own, and a disk that can be filled.

What cannot be made here (no root, no ``ip``) is left out, and ``missing`` says what and why: the workers then share this
machine's network, and faults of the network or the disk do not strike.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from hosts import Hosts, as_root
from standalone import Standalone

DISK_BYTES = 8 * 2**20


class Cluster:
    def __init__(self, folder: Path, hosts: int) -> None:
        self.missing: dict[str, str] = {}
        self.disk = folder / "disk"
        self.spark: Any = None
        self._folder = folder
        self._count = hosts
        self._hosts: Hosts | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        with self._stack:
            self._mount_disk()
            self._plug_network()
            host = "127.0.0.1" if self._hosts is None else self._hosts.driver
            standalone = Standalone(self._folder, host)
            self._stack.callback(standalone.end)
            for address in self.addresses or [host] * self._count:
                standalone.add_worker(address, prefix=[] if self._hosts is None else self._hosts.prefix(address))
            self._start_driver(standalone.url, host)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def addresses(self) -> list[str]:
        """The hosts' own addresses, in the order of the hosts."""
        return [] if self._hosts is None else self._hosts.addresses

    @property
    def cables(self) -> dict[str, str]:
        """The end of each host's cable on this machine, by its address."""
        return {} if self._hosts is None else self._hosts.cables

    def block(self, host: str, other: str) -> None:
        """Cut two hosts off from each other; both reach the driver and all other hosts as before."""
        assert self._hosts is not None
        self._hosts.block(host, other)

    def _start_driver(self, url: str, host: str) -> None:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = host
        from pyspark.sql import SparkSession

        settings = {
            "spark.driver.host": host,
            "spark.driver.bindAddress": host,
            "spark.executor.memory": "512m",
            "spark.decommission.enabled": "true",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        self.spark = SparkSession.builder.master(url).appName("chaos").config(map=settings).getOrCreate()
        self._stack.callback(self.spark.stop)
        self.spark.sparkContext.setLogLevel("OFF")

    def _mount_disk(self) -> None:
        self.disk.mkdir()
        try:
            as_root("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.disk))
        except OSError as error:
            self.missing["full disk"] = str(error)
        else:
            self._stack.callback(as_root, "umount", "--lazy", str(self.disk))

    def _plug_network(self) -> None:
        try:
            self._hosts = self._stack.enter_context(Hosts(self._count))
        except OSError as error:
            self.missing["network"] = str(error)
