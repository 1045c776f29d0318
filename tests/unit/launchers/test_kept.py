"""The process that a run leaves for the next one: who gets it, and when it is ended."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from local_clusters import take

from spark_elastic.launchers.kept import KeptParent
from spark_elastic.task import process_setting


def keep_one(kept: KeptParent) -> int:
    """Start and keep a process, as the first run does; return its number."""
    parent = kept.take(1)
    kept.keep(parent)
    return parent.pid


def test_the_next_run_gets_the_process_and_a_run_beside_it_one_of_its_own(kept: KeptParent) -> None:
    first = keep_one(kept)
    one, other = kept.take(1), kept.take(1)
    assert (one.pid == first, other.pid == first) == (True, False)
    one.end()
    other.end()


def test_of_two_runs_that_end_the_later_one_leaves_its_process(kept: KeptParent) -> None:
    one, other = kept.take(1), kept.take(1)
    kept.keep(one)
    kept.keep(other)
    assert one.has_ended
    assert take(kept) == other.pid


def set_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "else")


def put_a_folder_first_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/nowhere")


def replace_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path.cwd()
    folder.rmdir()
    (folder.parent / "in between").mkdir()
    folder.mkdir()
    os.chdir(folder)


def lower_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))


def take_a_core_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {77})


def install_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_setting, "package_marks", lambda path: (("/site-packages", 2, 3),))


def mask_permissions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_setting, "_umask", lambda: "Umask:\t0777")


@pytest.mark.parametrize(
    "change",
    [
        set_a_variable,
        put_a_folder_first_on_the_path,
        replace_the_working_directory,
        lower_a_limit,
        take_a_core_away,
        install_a_package,
        mask_permissions,
    ],
)
def test_a_process_that_differs_from_one_started_now_is_ended(
    change: Callable[[pytest.MonkeyPatch], None], kept: KeptParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = keep_one(kept)
    with monkeypatch.context() as changed:
        change(changed)
        assert take(kept) != first
    assert not psutil.pid_exists(first)


def test_a_process_with_another_number_of_threads_is_ended(kept: KeptParent) -> None:
    first = keep_one(kept)
    assert take(kept, cpus=2) != first
    assert not psutil.pid_exists(first)


def test_a_process_that_was_killed_is_replaced(kept: KeptParent) -> None:
    first = kept.take(1)
    kept.keep(first)
    os.kill(first.pid, signal.SIGKILL)
    first.story()
    assert take(kept) != first.pid


def test_a_process_that_is_stopped_is_ended(kept: KeptParent) -> None:
    first = kept.take(1)
    kept.keep(first)
    os.kill(first.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
    assert take(kept) != first.pid
    assert not psutil.pid_exists(first.pid)


def test_a_forked_child_leaves_the_process_to_the_one_that_has_started_it(kept: KeptParent) -> None:
    first = keep_one(kept)
    kept._lock.acquire()  # as another thread may
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        kept.renew_lock()
        kept.end()
        os._exit(0)
    kept._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert take(kept) == first
