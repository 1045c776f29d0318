"""A warm parent that does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import Any

import pytest

from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import supervisor
from spark_elastic.task.supervisor import HostFaultError, WorkerSupervisor


class Driver:
    crowded = False

    def send(self, message: Any) -> None:
        pass


@pytest.fixture
def never_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started as a warm parent does not answer."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **of: start(["sleep", "1000"], **of))


def hold(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


@pytest.mark.usefixtures("never_answer")
@pytest.mark.parametrize("is_held_first", [True, False], ids=["before the order", "after the order"])
def test_a_warm_parent_that_is_held_and_owes_an_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, is_held_first: bool
) -> None:
    monkeypatch.setattr(supervisor, "HELD_SECONDS", 0.05)

    async def scenario() -> None:
        ticket = Ticket("run", (), b"")
        async with WorkerSupervisor(ticket, Driver(), {"PATH": os.environ["PATH"]}) as watched:  # type: ignore[arg-type]
            assert watched._parent is not None
            pid = watched._parent.pid
            if is_held_first:
                hold(pid)
            watched.start(0, "token")
            if not is_held_first:
                await asyncio.sleep(0.2)  # an answer that is late for itself is no reason
                assert not watched.broken.done()
                hold(pid)
            with pytest.raises(HostFaultError, match=f"{pid} is stopped"):
                await asyncio.wait_for(watched.broken, 10)

    asyncio.run(asyncio.wait_for(scenario(), 30))
