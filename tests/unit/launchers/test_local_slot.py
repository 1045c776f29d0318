"""A slot's warm parent on this machine: it is forked, unless a variable has to be there when a process starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from spark_elastic.launchers import local_slot
from spark_elastic.launchers.local_slot import ForkedParent, fork_warm_parent
from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE, TASK_VARIABLE
from spark_elastic.task.facts import worker_environment
from spark_elastic.task.service import TaskPlace

PLACE = TaskPlace(0)


@pytest.fixture
def child() -> Iterator[ForkedParent]:
    """A forked process that waits."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    made = ForkedParent(pid, ours)
    yield made
    with suppress(ProcessLookupError):
        made.kill()
    ours.close()
    theirs.close()


def test_a_forked_parent_is_waited_for_as_long_as_one_likes_and_reaped(child: ForkedParent) -> None:
    assert not child.wait(0.01)
    child.kill()
    assert child.wait(30.0)
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)


class Started:
    """Stands for a parent in a fresh interpreter."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment


def usual() -> dict[str, str]:
    """What a worker's environment is where the user has set nothing."""
    me = str(os.getpid())
    return {**worker_environment(os.environ, {}, (), 1, sys.path), EXECUTOR_VARIABLE: me, TASK_VARIABLE: me}


def test_with_variables_of_the_users_a_fresh_interpreter_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are read only when a process starts, as MALLOC_ARENA_MAX."""
    monkeypatch.setattr(local_slot, "StartedParent", Started)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it was forked"))
    environment = {**usual(), "MALLOC_ARENA_MAX": "1"}
    started = fork_warm_parent(PLACE, environment)
    assert isinstance(started, Started)
    assert started.environment == environment


FORKING = """
import os, socket, sys
from spark_elastic.launchers import local_slot
from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE, TASK_VARIABLE
from spark_elastic.task.facts import worker_environment
from spark_elastic.task.service import TaskPlace

def serve(descriptor, task):
    with socket.socket(fileno=descriptor) as connection:
        connection.send(f"{task} {os.getsid(0) == os.getpid()} {os.environ[TASK_VARIABLE]}".encode())
        connection.recv(1)

local_slot.warm_parent.main = serve
me = str(os.getpid())
usual = {**worker_environment(os.environ, {}, (), 1, sys.path), EXECUTOR_VARIABLE: me, TASK_VARIABLE: me}
parent = local_slot.fork_warm_parent(TaskPlace(0), usual)
assert isinstance(parent, local_slot.ForkedParent)
assert parent.connection.recv(100).decode() == f"{me} True {me}"
parent.connection.close()  # as at the end of a task
assert parent.wait(30.0)
"""


def test_without_them_it_is_forked_in_a_session_of_its_own_and_its_connection_reaches_it() -> None:
    """In a process of its own, as there: a fork of one with threads may inherit a lock that nobody releases."""
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=60)
