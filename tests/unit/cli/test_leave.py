"""leave: what it says of the tasks that it has found, and how long it holds them; task/test_leave.py has their side of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from spark_elastic.cli import main
from spark_elastic.task.leave import LeaveCommand, asked_to_leave, hold

FIND_SECONDS = 0.2


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of its own, as far as the command is concerned, where tasks are found soon. Nothing is left there."""
    monkeypatch.setattr("spark_elastic.task.leave.FIND_SECONDS", FIND_SECONDS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], SimpleQueue[float]]]:
    """``tasks(left, staying)``: so many find the command as soon as it runs. Returns the moments at which slots are free."""
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []
    freed: SimpleQueue[float] = SimpleQueue()
    enter = LeaveCommand.__enter__

    def find(left: int, staying: int) -> SimpleQueue[float]:
        def wait_for_the_end(end: socket.socket) -> None:
            asyncio.run(hold(end, 0.0))
            freed.put(time.monotonic())

        def enter_and_call(command: LeaveCommand) -> LeaveCommand:
            enter(command)
            ends.extend(asyncio.run(asked_to_leave()) for _ in range(left + staying))
            threads.extend(threading.Thread(target=wait_for_the_end, args=[end]) for end in ends[:left])
            for thread in threads:
                thread.start()
            return command

        monkeypatch.setattr(LeaveCommand, "__enter__", enter_and_call)
        return freed

    yield find
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()


def test_workers_that_leave_are_told_of_with_the_time_that_it_took(
    tasks: Callable[[int, int], SimpleQueue[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks(2, 0)
    assert main(["leave", "--grace", "60"]) == 0
    assert re.fullmatch(r"2 tasks had their workers leave, in \d+\.\d s\n", capsys.readouterr().out)


def test_a_program_reads_from_the_outcome_that_one_of_two_workers_has_stayed(
    tasks: Callable[[int, int], SimpleQueue[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks(1, 1)
    assert main(["leave", "--grace", "1", "--json"]) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["tasks"], outcome["left"]) == (2, 1)
    assert outcome["seconds"] >= 1


def test_no_slot_is_free_until_the_machine_has_been_held_as_long_as_was_asked(
    tasks: Callable[[int, int], SimpleQueue[float]],
) -> None:
    freed = tasks(1, 0)
    began = time.monotonic()
    assert main(["leave", "--grace", "60", "--hold", "0.5"]) == 0
    assert freed.get(timeout=60) - began >= FIND_SECONDS + 0.5


@pytest.mark.parametrize(
    ("option", "value"), [("--hold", "-5"), ("--hold", "nan"), ("--hold", "inf"), ("--grace", "0")]
)
def test_times_that_are_none_are_refused_before_anyone_is_asked(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leave", option, value]) == 2
    assert f"{option} must be a number of seconds" in capsys.readouterr().err


def test_a_worker_that_stays_is_told_of_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, found = LeaveCommand.__enter__, []

    def enter_and_call(command: LeaveCommand) -> LeaveCommand:
        enter(command)
        found.append(asyncio.run(asked_to_leave()))
        return command

    monkeypatch.setattr(LeaveCommand, "__enter__", enter_and_call)
    assert main(["leave", "--grace", "1"]) == 1
    found[0].close()
    assert re.search(r"of 1 task 1 still had a worker after \d+\.\d s", capsys.readouterr().out)


def test_where_no_task_runs_nothing_is_waited_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as stale:  # of a command that was killed
        monkeypatch.chdir(tmp_path)
        stale.bind(f"spark_elastic-leave-{os.getuid()}")
    assert main(["leave"]) == 0
    assert capsys.readouterr().out == "no task of a job runs here\n"
    assert main(["leave", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() >= {"tasks": 0, "left": 0}.items()


def test_what_has_the_sockets_name_is_told_with_its_place_and_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / f"spark_elastic-leave-{os.getuid()}"
    place.mkdir()
    assert main(["leave"]) == 2
    error = capsys.readouterr().err
    assert f"the socket {place}, by which" in error
    assert f"belongs to the user with the number {os.getuid()}" in error
    place.rmdir()


def test_a_folder_that_takes_no_socket_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self/fd")
    with pytest.raises(
        PermissionError, match=r"the socket /proc/self/fd/spark_elastic-leave-\d+, .* cannot be made: [^;]+$"
    ):
        LeaveCommand().__enter__()


def test_there_is_one_command_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with LeaveCommand():
        assert main(["leave"]) == 2
    assert "another spark-elastic leave runs here" in capsys.readouterr().err
    assert main(["leave", "--grace", "0"]) == 2
