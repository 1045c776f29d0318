"""Tasks of an executor that is this process, and the importers that serve them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.messages import WorkerExited
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import importer
from spark_elastic.task.importer import RequestedParent, ask_importer
from spark_elastic.task.supervisor import WorkerSupervisor

TICKET = Ticket("run", (), Credentials(b"", b""))
SECONDS = 200.0  # only a failing test waits for so long

# An importer that imports nothing but what a test wants, and whose workers end at once.
CODE = """
import os, sys
from spark_elastic.worker.process import importer
from spark_elastic.worker.process import warm_parent

warm_parent.import_everything = lambda: None
warm_parent._run = lambda *_: 7
{change}
importer.main(*map(int, sys.argv[2:]))
"""
# Workers that stay until they are killed.
STAY = "import time; warm_parent._run = lambda *_: time.sleep(1000)"


class Driver:
    """Hears what the task tells."""

    crowded = False

    def __init__(self) -> None:
        self.exits: list[int] = []

    def send(self, message: Any) -> None:
        if isinstance(message, WorkerExited):
            self.exits.append(message.code)


class Task:
    """A task of this executor, for as long as its context lasts."""

    def __init__(self, **variables: str) -> None:
        self.driver = Driver()
        self._variables = variables

    async def __aenter__(self) -> Task:
        environment = {**os.environ, **self._variables}
        self.supervisor = WorkerSupervisor(TICKET, self.driver, environment, ask_importer)  # type: ignore[arg-type]
        await self.supervisor.__aenter__()
        self.parent = self.supervisor._parent
        return self

    async def __aexit__(self, *of: Any) -> None:
        await self.supervisor.__aexit__(*of)

    async def run_worker(self) -> int:
        self.supervisor.start(0, "token")
        idle = asyncio.ensure_future(self.supervisor.idle.wait())
        await asyncio.wait({idle, self.supervisor.broken}, return_when=asyncio.FIRST_COMPLETED)
        return self.driver.exits[-1]

    async def forked(self) -> int:
        """The number of the warm parent, once there is one."""
        assert isinstance(self.parent, RequestedParent)
        while not self.parent._pid and not self.supervisor.broken.done():
            await asyncio.sleep(0.001)
        return self.parent._pid


def importer_of(task: Task) -> int:
    assert isinstance(task.parent, RequestedParent)
    return importer._importer_at(task.parent._address)


def importers() -> set[int]:
    names = importer._addresses(importer._prefix(importer.find_executor_pid()))
    return {importer._importer_at(name) for name in names}


def play(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scenario(), SECONDS)

    return asyncio.run(bounded())


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(is_so: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (value := is_so()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


@contextlib.contextmanager
def own_importers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[[str], None]]:
    """Have this process be an executor. What is yielded takes code that is run in importers that are started from then on."""
    monkeypatch.chdir(folder)  # other tests have other importers
    # Each process of pytest's has an executor of its own.
    monkeypatch.setattr(importer, "find_executor_pid", os.getpid)
    monkeypatch.setattr(importer, "_above", lambda: iter([os.getpid()]))
    monkeypatch.setattr(importer, "END_SECONDS", SECONDS)
    monkeypatch.setattr(importer, "TURN_SECONDS", SECONDS)

    def set_change(code: str) -> None:
        monkeypatch.setattr(importer, "_CODE", CODE.format(change=code))

    set_change("")
    try:
        yield set_change
    finally:
        for process in importer._started:
            process.kill()
            process.wait()
        importer._started.clear()
