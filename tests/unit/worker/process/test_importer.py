"""The importer itself: whom it serves to their end, what it clears away, and when it gives its name up and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from importers import CODE, STAY, Task, importer_of, importers, is_alive, own_importers, play, wait_for

from spark_elastic.task import importer


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """``change(code)`` is run in importers that are started from now on."""
    with own_importers(monkeypatch, tmp_path) as set_change:
        yield set_change


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


def test_one_that_cannot_import_has_workers_tell_and_gives_its_name_up(change: Callable[[str], None]) -> None:
    change("warm_parent.import_everything = lambda: 1 / 0; warm_parent._tell = lambda *_: 3")

    async def job() -> int:
        async with Task() as task:
            return await task.run_worker()

    assert play(job) == 3
    change("")
    assert play(job) == 7


def test_what_a_jobs_workers_have_imported_the_next_jobs_find(change: Callable[[str], None]) -> None:
    change(
        "from spark_elastic.worker.process import imports\n"
        "imports.MODULES = ('wave', 'colorsys', 'this')\n"
        "def run(*_):\n"
        "    found = 'wave' in sys.modules\n"
        "    import wave\n"
        "    imports.note_imports()\n"
        "    return 8 if found else 9\n"
        "warm_parent._run = run"
    )

    async def job() -> int:
        async with Task() as task:
            return await task.run_worker()

    assert play(job) == 9
    # A job that follows at once may be served before the importer has heard that the last one is over.
    wait_for(lambda: play(job) == 8)


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
    from spark_elastic.worker.process.importer import _Importer

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
    imported = 0
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
        wait_for(lambda: not imported or not is_alive(imported))
