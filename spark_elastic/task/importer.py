"""The task's side of the importer: the process that imports torch once for all slots of an executor.

The importer listens at a socket whose name contains the executor's pid and ends with a digest of everything that a process
inherits. The first task that finds nobody there starts the importer; tasks that come while it imports wait in the socket's
queue. When a connection asks for it, the importer forks a warm parent, which then serves the task over the same connection.

Linux keeps such names in memory, per network namespace, and a name is free again when the importer is gone, however it has
ended. Every process on the machine can connect, so both ends ask the kernel for the other's user, and speak only with processes
of their own user.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from spark_elastic.protocol.fault_points import TASK_VARIABLE
from spark_elastic.protocol.ticket import DEVICE_VARIABLE
from spark_elastic.task import packets, processes
from spark_elastic.task.facts import find_executor_pid
from spark_elastic.task.process_setting import ProcessSetting
from spark_elastic.task.warm import StartedParent, WarmParent

# Variables that differ between an executor's tasks. CUDA reads its own at a worker's first use, so the warm parent can set them.
SLOT_VARIABLES = ("CUDA_VISIBLE_DEVICES", DEVICE_VARIABLE, TASK_VARIABLE)
# Spark's variables for its own Python processes; without its daemon, they differ for each. Workers do not need them.
SPARKS_OWN = "PYTHON_WORKER_FACTORY_"
# How many tasks may wait for an importer that is still importing: more than any machine has cores.
BACKLOG = 1024
# How long to retry while another task has taken the name but does not listen yet, or an importer gives up the name. Both take
# microseconds. No longer, either, while whoever has the name lets its queue stay full, as another user might.
TURN_SECONDS = 1.0
# How long an importer that is asked to end may take.
END_SECONDS = 2.0
# What an importer's interpreter runs. Its first argument, the address, identifies the importer.
_CODE = (
    f"{processes.OWN_PATH_ONLY}from spark_elastic.worker.process.importer import main; main(*map(int, sys.argv[2:]))"
)
# The importers that this process has started and has not seen end.
_started: list[subprocess.Popen[bytes]] = []


class RequestedParent:
    """A warm parent that the importer forks as soon as it has imported everything."""

    # The importer cleans up after the warm parent.
    is_child = False

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self._address = address
        self._pid = 0
        self._pidfd = -1

    @property
    def pid(self) -> int:
        """The pid of the warm parent, or of the importer until the warm parent is forked. 0 if there is neither."""
        return self._pid or _importer_at(self._address)

    def is_forked(self, pid: int, pidfd: int) -> None:
        """Note the forked process; ``pidfd`` is an open descriptor of it."""
        self._pid, self._pidfd = pid, pidfd

    def kill(self) -> None:
        """Send SIGKILL to the warm parent, or to the importer until the warm parent is forked."""
        if self._pidfd >= 0:
            processes.signal_open(self._pidfd, signal.SIGKILL)
        elif pid := self.pid:
            os.kill(pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the warm parent has ended, if it was forked. Return False if it has not ended within this time."""
        if self._pidfd < 0:
            return True
        if not select.select([self._pidfd], [], [], seconds)[0]:
            return False
        os.close(self._pidfd)
        self._pidfd = -1
        return True


def ask_importer(environment: Mapping[str, str]) -> WarmParent:
    """Have the executor's importer fork a warm parent. Start the importer if there is none.

    Returns before the warm parent has been forked. If no importer can be started, a warm parent is started for this task alone.
    """
    shared = {
        name: value
        for name, value in environment.items()
        if name not in SLOT_VARIABLES and not name.startswith(SPARKS_OWN)
    }
    try:
        address = _prefix(find_executor_pid()) + _digest(ProcessSetting.of_a_child(shared))
        connection = _connect(address, shared)
    except OSError:  # the working directory is gone, or the name is taken, such as by another user
        return StartedParent(environment)
    own = {name: value for name, value in environment.items() if name in SLOT_VARIABLES}
    packets.send(connection, packets.Fork(own))
    return RequestedParent(connection, address)


def end_idle_importers(_: Iterable[object] = ()) -> Iterable[bytes]:
    """End the importers of this task's executor that serve no job, and wait for their end."""
    for address in _addresses(_prefix(find_executor_pid())):
        _ask_to_end(address)
    return ()


def is_peer_mine(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user as this one."""
    return _peer(connection)[1] == os.getuid()


def peer_pid(connection: socket.socket) -> int:
    """Return the pid of the process that has connected."""
    return _peer(connection)[0]


def _connect(address: str, environment: Mapping[str, str]) -> socket.socket:
    end = time.monotonic() + TURN_SECONDS
    while True:
        begun = time.monotonic()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)  # a full queue must hold up nobody
        try:
            connection.connect("\0" + address)
            if not is_peer_mine(connection):
                raise PermissionError(f"{address} is a socket of another user")
            connection.setblocking(True)
            return connection
        except OSError as error:
            connection.close()
            if not isinstance(error, (ConnectionRefusedError, BlockingIOError)):
                raise
        if not _start(address, environment):
            if begun > end:
                raise TimeoutError(f"nobody listens at {address}")
            time.sleep(0.001)  # the kernel offers nothing to wait for here


def _start(address: str, environment: Mapping[str, str]) -> bool:
    """Start an importer that listens at ``address``. Return False if another process has the address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind("\0" + address)
        except OSError:
            return False
        listening.listen(BACKLOG)
        for other in _addresses(_prefix(find_executor_pid())):
            if other != address:
                _ask_to_end(other, wait=False)  # it was started with settings that are out of date
        above = [os.pidfd_open(pid) for pid in _above()]
        _started[:] = [process for process in _started if process.poll() is None]
        try:
            importer = subprocess.Popen(
                [sys.executable, "-c", _CODE, address, *map(str, (listening.fileno(), *above))],
                pass_fds=[listening.fileno(), *above],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            _started.append(importer)
        finally:
            for descriptor in above:
                os.close(descriptor)
    return True


def _above() -> Iterator[int]:
    """Yield the pids of the processes above this one: pyspark's daemon, if there is one, and the executor."""
    executor = find_executor_pid()
    for ancestor in psutil.Process().parents():
        yield ancestor.pid
        if ancestor.pid == executor:
            return


def _ask_to_end(address: str, wait: bool = True) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(END_SECONDS if wait else 0)
        try:
            connection.connect("\0" + address)
            if not is_peer_mine(connection):
                return
            packets.send(connection, packets.End())
            _, descriptors = packets.receive_answer(connection) if wait else (None, [])
        except OSError:
            return  # it has just ended, is importing, or is stopped
    for pidfd in descriptors:
        select.select([pidfd], [], [], END_SECONDS)
        os.close(pidfd)


def _addresses(prefix: str) -> set[str]:
    """Return the names at which an executor's importers listen."""
    # Names of other users may consist of any bytes, also those that end a line.
    words = Path("/proc/net/unix").read_text(errors="replace").split()
    return {word[1:] for word in words if word.startswith(f"@{prefix}")}


def _prefix(executor: int) -> str:
    # Containers that share a network namespace may have processes with the same pid.
    return f"spark_elastic-{os.stat('/proc/self/ns/pid').st_ino}-{executor}-"


def _digest(setting: ProcessSetting) -> str:
    ancestors = [(pid, psutil.Process(pid).create_time()) for pid in _above()]
    files = os.stat("/proc/self/ns/mnt").st_ino
    return hashlib.sha256(repr((ancestors, files, setting)).encode()).hexdigest()[:32]


def _importer_at(address: str) -> int:
    """Return the pid of the importer that was started for an address, 0 if there is none."""
    # The processes that it has forked have the same command.
    found = {process.pid for process in psutil.process_iter() if address in _own_command(process)}
    return next((pid for pid in found if _parent_of(pid) not in found), 0)


def _own_command(process: psutil.Process) -> list[str]:
    """Return the command of a process of this user; of others, who may write an address into theirs, nothing."""
    try:
        return list(process.cmdline()) if process.uids().real == os.getuid() else []
    except psutil.Error:
        return []


def _parent_of(pid: int) -> int:
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.Error:
        return 0


def _peer(connection: socket.socket) -> tuple[int, int]:
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user
