"""What a Spark task leaves for the next task in its Python process, which Spark reuses: the warm parent.

The warm parent stays a child of that process, and the two communicate over a socket pair that no other process can open.
Therefore no proof of identity is needed when it is used again, and it ends when the process does: with the executor, with the
session, or when Spark has had no task for the process for a minute. A warm parent ends by itself, too, when no job has used it
for long, and when ``spark_elastic.shutdown`` is called.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import psutil

from spark_elastic.task import processes
from spark_elastic.task.facts import find_executor_pid
from spark_elastic.task.process_setting import ProcessSetting


class WarmParent(Protocol):
    """The child process from which workers are forked."""

    @property
    def pid(self) -> int:
        """The id of the process."""

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""

    def kill(self) -> None:
        """SIGKILL the process."""


@dataclass(frozen=True)
class IdleParent:
    """A warm parent that knows of no job, with this process's end of the connection to it."""

    process: WarmParent
    connection: socket.socket
    setting: ProcessSetting

    def fits(self, setting: ProcessSetting) -> bool:
        """Whether the process can serve, as one could that is started with ``setting`` now."""
        sign = processes.ExitSign(self.process.pid)
        try:
            return self.setting == setting and not sign.is_seen() and not sign.is_stopped()
        finally:
            sign.close()

    def end(self) -> None:
        """Kill the process, below which there is nothing, and wait for that."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


class KeptParent:
    """Holds at most one warm parent. Used by the main thread only, as tasks are."""

    def __init__(self) -> None:
        self._idle: IdleParent | None = None

    def take(self, setting: ProcessSetting) -> IdleParent | None:
        """Hand over the warm parent if it fits; else end it."""
        idle, self._idle = self._idle, None
        if idle is None or idle.fits(setting):
            return idle
        idle.end()
        return None

    def end(self) -> None:
        """End the warm parent, if there is one."""
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.end()

    def keep(self, idle: IdleParent) -> None:
        """Hold a warm parent. The one that was held before has been taken."""
        assert self._idle is None
        self._idle = idle


# The warm parent of the Python process in which Spark runs tasks.
KEPT = KeptParent()

# How long a warm parent that serves no job may take to end; one that serves a job does not.
END_SECONDS = 2.0
# What the command of a warm parent, and of all that is forked from it, contains.
_COMMAND = "spark_elastic.worker.warm_parent"


def end_idle_parents(_: Iterable[object] = ()) -> Iterable[bytes]:
    """End the warm parents below this task's executor that serve no job, whichever Python process of Spark's they belong to."""
    KEPT.end()
    for pid in find_warm_parents(find_executor_pid()):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            ask_to_end(pid)
    return ()


def find_warm_parents(executor: int) -> Iterator[int]:
    """Find the warm parents among the descendants of an executor, without their forks, which have the same command."""
    warm = {process.pid for process in psutil.Process(executor).children(recursive=True) if _is_warm(process)}
    for pid in warm:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).ppid() not in warm:
                yield pid


def ask_to_end(pid: int) -> None:
    """Have a warm parent end if it serves no job, and wait for that. Raises ``ProcessLookupError`` if it has ended already."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
        select.select([descriptor], [], [], END_SECONDS)
    finally:
        os.close(descriptor)


def _is_warm(process: psutil.Process) -> bool:
    try:
        return _COMMAND in " ".join(process.cmdline())
    except psutil.Error:
        return False
