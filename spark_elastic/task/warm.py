"""The warm parent as its task sees it: a process and the connection to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from spark_elastic.task.processes import OWN_PATH_ONLY


class WarmParent(Protocol):
    """The process from which a task's worker is forked."""

    @property
    def is_child(self) -> bool:
        """Whether the process is a child of this one, which then has to clean up after it."""

    @property
    def connection(self) -> socket.socket:
        """This end of the connection to the process. When it is closed, the process ends with everything below it."""

    @property
    def pid(self) -> int:
        """The process id."""

    def kill(self) -> None:
        """Send the process SIGKILL."""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the process has ended. Return False if it has not ended within this time."""


class StartedParent:
    """A warm parent in a fresh interpreter."""

    is_child = True

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        call = "main(int(sys.argv[1]), int(sys.argv[2]))"
        code = f"{OWN_PATH_ONLY}from spark_elastic.worker.process.warm_parent import main; {call}"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self._process.kill()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the process has ended. Return False if it has not ended within this time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
