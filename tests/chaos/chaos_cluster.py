"""Hosts for chaos: standalone workers in network namespaces of their own, joined by a bridge, and a disk that can be filled.

What cannot be made here (no root, no ``ip``) is left out, and ``missing`` says what and why: the workers then share this
machine's network, and faults of the network or the disk do not strike.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from standalone import Standalone

DISK_BYTES = 8 * 2**20


class Cluster:
    def __init__(self, folder: Path, hosts: int) -> None:
        self.missing: dict[str, str] = {}
        self.disk = folder / "disk"
        # The end of each host's cable on this machine, by its address.
        self.cables: dict[str, str] = {}
        # What runs a command on each host, by its address.
        self._prefixes: dict[str, list[str]] = {}
        self.spark: Any = None
        self._folder = folder
        self._hosts = hosts
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        with self._stack:
            self._mount_disk()
            places = self._plug_network() or [("127.0.0.1", [])] * self._hosts
            host = "127.0.0.1" if not self.cables else _address(1)
            standalone = Standalone(self._folder, host)
            self._stack.callback(standalone.end)
            for address, prefix in places:
                standalone.add_worker(address, prefix=prefix)
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
        return list(self._prefixes)

    def block(self, host: str, other: str) -> None:
        """Cut two hosts off from each other; both reach the driver and all other hosts as before."""
        for here, there in ((host, other), (other, host)):
            _root(*self._prefixes[here], "ip", "route", "add", "blackhole", f"{there}/32")

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
            _root("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.disk))
        except OSError as error:
            self.missing["full disk"] = str(error)
        else:
            self._stack.callback(_root, "umount", "--lazy", str(self.disk))

    def _plug_network(self) -> list[tuple[str, list[str]]]:
        """Make a namespace for each host; return the hosts' addresses, and what runs a command there."""
        bridge = _name("br")
        cables, places = {}, []
        try:
            with ExitStack() as undo:
                _root("ip", "link", "add", bridge, "type", "bridge")
                undo.callback(_root, "ip", "link", "del", bridge)
                _root("ip", "addr", "add", f"{_address(1)}/24", "dev", bridge)
                _root("ip", "link", "set", bridge, "up")
                for number in range(self._hosts):
                    space, cable, address = _name(f"h{number}"), _name(f"c{number}"), _address(2 + number)
                    _root("ip", "netns", "add", space)
                    undo.callback(_root, "ip", "netns", "del", space)
                    _root("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
                    _root("ip", "link", "set", cable, "master", bridge, "up")
                    for command in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"],
                                    ["link", "set", "lo", "up"]):  # fmt: skip
                        _root("ip", "-n", space, *command)
                    cables[address] = cable
                    places.append((address, ["ip", "netns", "exec", space]))
                self._stack.push(undo.pop_all())
        except OSError as error:
            self.missing["network"] = str(error)
            return []
        self.cables, self._prefixes = cables, dict(places)
        return places


def _name(what: str) -> str:
    return f"se{os.getpid()}{what}"


def _address(last: int) -> str:
    return f"10.213.{os.getpid() % 250}.{last}"


def _root(*command: str) -> None:
    """Run a command that needs root. Raises ``OSError`` with what it says."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
