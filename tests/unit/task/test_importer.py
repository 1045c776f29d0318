"""One importer for all tasks of an executor: who starts it, who shares it, and when another one takes its place."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from importers import SECONDS, STAY, Task, importer_of, importers, is_alive, own_importers, play, wait_for

from spark_elastic.task import importer, packets, supervisor
from spark_elastic.task.importer import RequestedParent, ask_importer, end_idle_importers
from spark_elastic.task.warm import StartedParent


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """``change(code)`` is run in importers that are started from now on."""
    with own_importers(monkeypatch, tmp_path) as set_change:
        yield set_change


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


@pytest.mark.usefixtures("change")
def test_workers_create_files_with_the_permissions_that_their_task_would_use() -> None:
    async def job() -> set[int]:
        async with Task() as task:
            await task.forked()
            return {importer_of(task)}

    first = play(job)
    before = os.umask(0o077)
    try:
        assert play(job) != first
    finally:
        os.umask(before)


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
def test_where_the_names_holder_has_a_full_queue_the_task_starts_a_parent_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importer, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(importer, "_digest", lambda setting: "held")
    name = f"\0{importer._prefix(os.getpid())}held"
    with contextlib.ExitStack() as held:
        holder = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        holder.bind(name)
        holder.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting.setblocking(False)
                waiting.connect(name)
        parent = ask_importer({**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert isinstance(parent, StartedParent)
    parent.connection.close()
    assert parent.wait(SECONDS)


@pytest.mark.usefixtures("change")
@pytest.mark.parametrize("name", [b"\xff\xfe", b"x\n\nx"])
def test_sockets_of_other_users_may_have_any_names(name: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as strange:
        strange.bind(b"\0spark_elastic-test-%d" % os.getpid() + name)
        parent = ask_importer(os.environ)
        assert isinstance(parent, RequestedParent)
        packets.receive_answer(parent.connection)
        parent.connection.close()
        end_idle_importers()


def test_a_process_of_another_user_that_has_the_address_in_its_command_is_no_importer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "print(flush=True); input()"
    command = [sys.executable, "-c", code, "an-address"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert importer._importer_at("an-address") == process.pid
        monkeypatch.setattr(os, "getuid", lambda: psutil.Process(process.pid).uids().real + 1)
        assert importer._importer_at("an-address") == 0
        process.communicate(b"\n")


@pytest.mark.usefixtures("change")
def test_where_the_working_directory_is_gone_the_task_starts_a_parent_of_its_own(tmp_path: Path) -> None:
    tmp_path.rmdir()
    parent = ask_importer({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert isinstance(parent, StartedParent)
    parent.connection.close()
    assert parent.wait(SECONDS)
