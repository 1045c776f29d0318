"""A warm parent that does not answer."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
from typing import Any

import pytest

from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import supervisor
from spark_elastic.task.supervisor import WorkerSupervisor


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
            assert f"{pid} is stopped" in await asyncio.wait_for(watched.broken, 10)

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.usefixtures("never_answer")
def test_the_end_of_a_warm_parent_at_which_nobody_looks_any_more_is_not_complained_of() -> None:
    """At the end of a job, the warm parent may die while its task is leaving: asyncio printed "exception was never retrieved"."""
    complaints: list[Any] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with WorkerSupervisor(Ticket("run", (), b""), Driver(), {"PATH": os.environ["PATH"]}) as watched:  # type: ignore[arg-type]
            assert watched._parent is not None
            os.kill(watched._parent.pid, signal.SIGKILL)
            await asyncio.wait({watched.broken}, timeout=10)
            assert watched.broken.done()
        del watched
        gc.collect()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert complaints == []
