"""One importer for all tasks of an executor: who starts it, whom it serves, and when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.messages import WorkerExited
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import importer, packets, processes, supervisor
from spark_elastic.task.importer import RequestedParent, ask_importer, end_idle_importers
from spark_elastic.task.supervisor import WorkerSupervisor
from spark_elastic.task.warm import StartedParent

TICKET = Ticket("run", (), Credentials(b"", b""))
SECONDS = 200.0  # only a failing test waits for so long

# An importer that imports nothing but what a test wants, and whose workers end at once.
CODE = """
import os, sys
from spark_elastic.worker import importer, warm_parent

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


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """``change(code)`` is run in importers that are started from now on."""
    monkeypatch.chdir(tmp_path)  # other tests have other importers
    # Each process of pytest's has an executor of its own.
    monkeypatch.setattr(importer, "find_executor_pid", os.getpid)
    monkeypatch.setattr(importer, "_above", lambda: iter([os.getpid()]))
    monkeypatch.setattr(importer, "END_SECONDS", SECONDS)
    monkeypatch.setattr(importer, "TURN_SECONDS", SECONDS)

    def set_change(code: str) -> None:
        monkeypatch.setattr(importer, "_CODE", CODE.format(change=code))

    set_change("")
    yield set_change
    for process in importer._started:
        process.kill()
        process.wait()
    importer._started.clear()


@pytest.mark.usefixtures("change")
def test_tasks_of_an_executor_share_an_importer_and_so_does_the_next_job() -> None:
    async def job() -> set[int]:
        async with Task() as one, Task() as other:
            assert [await one.run_worker(), await other.run_worker()] == [7, 7]
            assert await one.forked() != await other.forked()
            return {importer_of(one), importer_of(other), *importers()}

    (first,) = play(job)
    assert play(job) == {first}
    wait_for(lambda: not psutil.Process(first).children())


@pytest.mark.usefixtures("change")
def test_tasks_that_come_at_the_same_time_start_one_importer() -> None:
    asked = []
    threads = [threading.Thread(target=lambda: asked.append(ask_importer(os.environ))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for parent in asked:
        packets.receive_answer(parent.connection)
        parent.connection.close()
    assert [type(parent) for parent in asked] == [RequestedParent] * 16
    assert len(importers()) == 1


def test_workers_see_the_gpu_of_their_slot(change: Callable[[str], None]) -> None:
    change('warm_parent._run = lambda *_: int(os.environ["CUDA_VISIBLE_DEVICES"])')

    async def job() -> None:
        async with Task(CUDA_VISIBLE_DEVICES="5") as one, Task(CUDA_VISIBLE_DEVICES="6") as other:
            assert [await one.run_worker(), await other.run_worker()] == [5, 6]
            assert importer_of(one) == importer_of(other)

    play(job)


@pytest.mark.usefixtures("change")
def test_python_processes_that_spark_starts_without_its_daemon_share_an_importer() -> None:
    async def job() -> None:
        async with Task(PYTHON_WORKER_FACTORY_PORT="5") as one, Task(PYTHON_WORKER_FACTORY_PORT="6") as other:
            await one.forked()
            await other.forked()
            assert importer_of(one) == importer_of(other)

    play(job)


def test_numpys_random_numbers_differ_between_slots(change: Callable[[str], None]) -> None:
    change("import numpy; warm_parent._run = lambda *_: numpy.random.randint(200)")

    async def job() -> list[int]:
        async with Task() as one, Task() as two, Task() as three, Task() as four:
            return [await task.run_worker() for task in (one, two, three, four)]

    assert len(set(play(job))) > 1


def set_another_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANOTHER", "variable")


def move(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")


def replace_an_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_elastic.task.process_setting.package_marks", lambda path: (("/code.zip", 2, 3),))


@pytest.mark.usefixtures("change")
@pytest.mark.parametrize("differ", [set_another_variable, move, replace_an_archive])
def test_another_one_is_started_for_another_setting_in_place_of_one_that_serves_nobody(
    differ: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job() -> int:
        async with Task() as task:
            await task.run_worker()
            return importer_of(task)

    first = play(job)
    differ(monkeypatch)
    assert play(job) != first
    wait_for(lambda: not is_alive(first))


def test_one_that_serves_a_task_is_left_alone_by_those_of_another_setting_and_by_shutdown(
    change: Callable[[str], None],
) -> None:
    change(STAY)

    async def jobs() -> set[int]:
        async with Task() as one, Task(ANOTHER="variable") as other:
            pids = {await one.forked(), await other.forked()}
            end_idle_importers()
            both = {importer_of(one), importer_of(other)}
            assert all(map(is_alive, pids | both))
            assert len(both) == 2
            return both

    left = play(jobs)
    wait_for(lambda: not any(psutil.Process(pid).children() for pid in left if is_alive(pid)))
    end_idle_importers()
    assert not any(map(is_alive, left))


def test_an_importer_that_dies_leaves_running_workers_alone(change: Callable[[str], None]) -> None:
    change(STAY)

    async def job() -> None:
        async with Task() as task:
            task.supervisor.start(0, "token")
            pid = await task.forked()
            (worker,) = await asyncio.to_thread(wait_for, psutil.Process(pid).children)
            os.kill(first := importer_of(task), signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: not is_alive(first))  # until then its socket takes connections
            async with Task() as other:
                assert await other.forked()
                assert importer_of(other) not in (0, first)
            assert worker.is_running()
            assert not task.supervisor.broken.done()
        assert not is_alive(worker.pid)

    play(job)


def test_what_a_killed_warm_parent_leaves_is_ended_by_the_importer(change: Callable[[str], None]) -> None:
    change(
        "import subprocess, time\n"
        "warm_parent._run = lambda *_: (subprocess.Popen(['sleep', '1000'], start_new_session=True), time.sleep(1000))"
    )

    async def job() -> None:
        async with Task() as task, Task() as other:
            task.supervisor.start(0, "token")
            spared, pid = await other.forked(), await task.forked()
            await asyncio.to_thread(wait_for, lambda: len(psutil.Process(pid).children(recursive=True)) == 2)
            below = psutil.Process(pid).children(recursive=True)
            os.kill(pid, signal.SIGKILL)
            assert "ended" in await task.supervisor.broken
            await asyncio.to_thread(wait_for, lambda: not any(process.is_running() for process in below))
            assert is_alive(spared)

    play(job)


def test_one_that_is_held_while_it_imports_is_given_up_and_replaced(
    change: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change("warm_parent.import_everything = lambda: os.kill(os.getpid(), 19)")
    monkeypatch.setattr(supervisor, "HELD_SECONDS", 0.05)

    async def job() -> int:
        async with Task() as task:
            task.supervisor.start(0, "token")
            assert "is stopped" in await task.supervisor.broken
            return importer_of(task)

    held = play(job)
    wait_for(lambda: not is_alive(held))
    change("")

    async def another_attempt() -> int:
        async with Task() as task:
            return await task.run_worker()

    assert play(another_attempt) == 7


def test_one_that_cannot_import_has_workers_tell_and_gives_its_name_up(change: Callable[[str], None]) -> None:
    change("warm_parent.import_everything = lambda: 1 / 0; warm_parent._tell = lambda *_: 3")

    async def job() -> int:
        async with Task() as task:
            return await task.run_worker()

    assert play(job) == 3
    change("")
    assert play(job) == 7


def test_one_that_nobody_needs_ends_and_one_that_serves_stays(change: Callable[[str], None]) -> None:
    change("warm_parent.processes.IDLE_SECONDS = 0.1")

    async def job() -> int:
        async with Task() as task:
            await task.forked()
            await asyncio.sleep(0.5)
            assert await task.run_worker() == 7
            return importer_of(task)

    pid = play(job)
    wait_for(lambda: not is_alive(pid))
    assert importers() == set()


def test_tasks_that_come_while_it_gives_its_name_up_are_served() -> None:
    """As many as came before nobody could connect any more."""
    from spark_elastic.worker.importer import _Importer

    address = f"\0spark_elastic-test-{os.getpid()}"
    socket_of = importer.socket.socket
    with socket_of(importer.socket.AF_UNIX, importer.socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        serving = _Importer(listening, (), None)
        with socket_of(importer.socket.AF_UNIX, importer.socket.SOCK_SEQPACKET) as early:
            early.connect(address)
            serving.retire()
            assert serving._is_needed
            with socket_of(importer.socket.AF_UNIX, importer.socket.SOCK_SEQPACKET) as late:
                with pytest.raises(ConnectionRefusedError):
                    late.connect(address)
                late.bind(address)
        serving.serve()


@pytest.mark.usefixtures("change")
def test_where_the_name_belongs_to_another_user_the_task_starts_a_parent_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importer, "is_peer_mine", lambda connection: False)
    parent = ask_importer({**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert isinstance(parent, StartedParent)
    parent.connection.close()
    assert parent.wait(SECONDS)


@pytest.mark.usefixtures("change")
def test_where_the_working_directory_is_gone_the_task_starts_a_parent_of_its_own(tmp_path: Path) -> None:
    tmp_path.rmdir()
    parent = ask_importer({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert isinstance(parent, StartedParent)
    parent.connection.close()
    assert parent.wait(SECONDS)


EXECUTOR = """
import os, subprocess, sys
code = '''
import os, sys, time
from spark_elastic.task import importer, packets

importer._CODE = {code!r}
parent = importer.ask_importer(dict(os.environ))
answer, _ = packets.receive_answer(parent.connection)
os.set_inheritable(parent.connection.fileno(), True)
pid = os.fork()
if pid == 0:
    time.sleep(1000)  # it holds the connection open
print(os.getpid(), answer.pid, parent._address, pid, flush=True)
time.sleep(1000)
'''
subprocess.run([sys.executable, "-c", code])
"""


@pytest.mark.parametrize("killed", ["task", "executor"])
def test_a_warm_parent_ends_with_its_task_and_the_importer_with_its_executor(
    killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = EXECUTOR.replace("{code!r}", repr(CODE.format(change="")).replace("\\", "\\\\"))
    executor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        assert executor.stdout is not None
        task, parent, address, holder = executor.stdout.readline().split()
        imported = importer._importer_at(address)
        pids = [int(task), int(holder)]
        assert is_alive(imported)
        assert psutil.Process(int(parent)).ppid() == imported
        if killed == "task":
            os.kill(int(task), signal.SIGKILL)
            wait_for(lambda: not is_alive(int(parent)))
        else:
            executor.kill()
            wait_for(lambda: not is_alive(imported) and not is_alive(int(parent)))
    finally:
        executor.kill()
        executor.communicate() if not pids else executor.wait()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(imported))


def test_signals_for_a_process_that_has_ended_are_ignored() -> None:
    process = subprocess.Popen(["true"])
    descriptor = os.pidfd_open(process.pid)
    process.wait()
    processes.signal_open(descriptor, signal.SIGKILL)
    os.close(descriptor)
