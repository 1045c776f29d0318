"""The warm parent that a task leaves for the next one: when it is taken again, and when it is ended instead."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.messages import WorkerExited
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import packets, process_setting
from spark_elastic.task.kept import KeptParent, ask_to_end, find_warm_parents
from spark_elastic.task.supervisor import WorkerSupervisor
from spark_elastic.worker import warm_parent

TICKET = Ticket("run", (), Credentials(b"", b""))
SECONDS = 60.0  # only a failing test waits for so long

# A warm parent that imports nothing, and whose workers end at once.
PARENT = """
import sys
from spark_elastic.worker import warm_parent

{change}
warm_parent.import_everything = {imports}
warm_parent._run = lambda *_: 7
warm_parent.main(int(sys.argv[1]), int(sys.argv[2]))
"""


class Driver:
    """Hears what the task tells, and lets it wait for the exit of its worker."""

    crowded = False

    def __init__(self) -> None:
        self.exits: list[int] = []

    def send(self, message: Any) -> None:
        if isinstance(message, WorkerExited):
            self.exits.append(message.code)


class Host:
    """A Python process of Spark's, this one, in which tasks run one after the other."""

    def __init__(self) -> None:
        self.kept = KeptParent()
        self.started: list[int] = []
        self.change = self.imports = ""

    def start(self, descriptor: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        code = PARENT.format(change=self.change, imports=self.imports or "lambda: None")
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(descriptor), str(os.getpid())], pass_fds=[descriptor], env=environment
        )
        self.started.append(process.pid)
        return process

    def run_task(
        self, *, variable: str = "", forks: bool = True, is_released: bool = True, is_held: bool = False
    ) -> int:
        """Run a task with one worker, until the driver releases it or is gone. Returns the warm parent's number."""

        async def task() -> int:
            driver = Driver()
            environment = {**os.environ, "VARIABLE": variable}
            async with WorkerSupervisor(TICKET, driver, environment, self.start, self.kept) as watched:  # type: ignore[arg-type]
                assert watched._process is not None
                if forks:
                    watched.start(0, "token")
                    await watched.idle.wait()
                    assert driver.exits == [1 if self.imports else 7]
                if is_held:
                    hold(watched._process.pid)
                if is_released:
                    await watched.rest()
                return watched._process.pid

        return asyncio.run(asyncio.wait_for(task(), SECONDS))


def hold(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.chdir(tmp_path)
    host = Host()
    before = set(psutil.Process().children())
    yield host
    if host.kept._idle is not None:
        host.kept._idle.end()
    assert set(psutil.Process().children()) <= before


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_next_task_of_the_process_takes_the_warm_parent_and_so_does_the_one_after_it(host: Host) -> None:
    first = host.run_task()
    assert is_alive(first)
    assert [host.run_task(), host.run_task()] == [first, first]
    assert host.started == [first]


def set_another_variable(host: Host, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANOTHER", "variable")


def move(host: Host, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")


def replace_an_archive(host: Host, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_setting, "package_marks", lambda path: (("/code.zip", 2, 3),))


def kill(host: Host, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def stop(host: Host, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(pid)


@pytest.mark.parametrize("change", [set_another_variable, move, replace_an_archive, kill, stop])
def test_another_one_is_started_where_it_differs_or_cannot_serve(
    change: Callable[[Host, int, pytest.MonkeyPatch], None], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host.run_task()
    change(host, first, monkeypatch)
    assert host.run_task() != first
    assert not psutil.pid_exists(first)


def test_another_one_is_started_for_other_variables_of_the_users(host: Host) -> None:
    first = host.run_task(variable="one")
    assert host.run_task(variable="other") != first
    assert not psutil.pid_exists(first)


@pytest.mark.parametrize(
    "end",
    [{"is_released": False}, {"forks": False}, {"is_held": True}],
    ids=["the driver is gone", "it may still be importing", "it is held"],
)
def test_it_ends_with_the_task_if(end: dict[str, bool], host: Host) -> None:
    assert not psutil.pid_exists(host.run_task(**end))
    assert host.kept._idle is None


def test_it_ends_with_the_task_if_it_could_not_import(host: Host) -> None:
    host.change = "warm_parent._tell = lambda *_: 1"
    host.imports = "lambda: 1 / 0"
    assert not psutil.pid_exists(host.run_task())


def test_it_ends_when_no_job_has_used_it_for_long_and_stays_while_one_does(host: Host) -> None:
    host.change = "warm_parent.processes.IDLE_SECONDS = 0.2"

    async def task() -> None:
        async with WorkerSupervisor(TICKET, Driver(), dict(os.environ), host.start, host.kept) as watched:  # type: ignore[arg-type]
            watched.start(0, "token")
            await watched.idle.wait()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(watched.broken), 1.0)
            await watched.rest()

    asyncio.run(asyncio.wait_for(task(), SECONDS))
    assert host.kept._idle is not None
    assert host.kept._idle.process.wait() == 0


def test_one_that_serves_no_job_ends_when_it_is_asked_to_and_one_that_does_stays(host: Host) -> None:
    async def task() -> None:
        async with WorkerSupervisor(TICKET, Driver(), dict(os.environ), host.start, host.kept) as watched:  # type: ignore[arg-type]
            watched.start(0, "token")
            await watched.idle.wait()
            assert watched._process is not None
            os.kill(watched._process.pid, signal.SIGUSR1)
            watched.start(1, "token")
            await watched.idle.wait()
            assert not watched.broken.done()
            await watched.rest()

    asyncio.run(asyncio.wait_for(task(), SECONDS))
    assert host.kept._idle is not None
    pid = host.kept._idle.process.pid
    ask_to_end(pid)
    assert not is_alive(pid)
    assert host.run_task() != pid, "the next task starts another one"


def test_it_is_found_below_an_executor_without_what_is_forked_from_it() -> None:
    forks = "import os, signal; os.fork() or os.fork(); os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
    command = [sys.executable, "-c", f"import spark_elastic.worker.warm_parent; {forks}"]
    warm = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert warm.stdout is not None
        family = {int(warm.stdout.readline()) for _ in range(3)}
        assert [pid for pid in find_warm_parents(os.getpid()) if pid in family] == [warm.pid]
    finally:
        for process in [*psutil.Process(warm.pid).children(recursive=True), warm]:
            process.kill()
        warm.communicate()


def test_where_the_working_directory_is_gone_nothing_is_kept_and_the_task_runs(host: Host, tmp_path: Path) -> None:
    host.change = f"import os; os.chdir({str(tmp_path.parent)!r})"
    tmp_path.rmdir()
    assert not psutil.pid_exists(host.run_task())


def test_a_warm_parent_that_rests_has_forgotten_the_ticket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        guardian = warm_parent._Guardian(theirs, None)
        packets.send(ours, packets.Begin(TICKET))
        assert guardian._obey()
        assert guardian._ticket == TICKET
        packets.send(ours, packets.Rest())
        assert guardian._obey()
        assert guardian._ticket is None
        assert packets.receive_answer(ours) == (packets.Resting(), [])
