"""What run() finds out of its arguments before it starts anything."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spark_elastic
from spark_elastic.driver import run as run_module
from spark_elastic.launchers.local import LocalLauncher
from spark_elastic.loggers import TensorBoardLogger
from spark_elastic.protocol.fault_points import TASK_VARIABLE


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"min_np": np.int64(2), "max_np": np.int32(1)}, "min_np <= max_np must hold, but min_np=2, max_np=1"),
        ({"num_proc": np.int64(0)}, "num_proc must be a whole number from 1 on, not 0"),
        ({"num_proc": True}, "num_proc must be a whole number from 1 on, not True"),
        ({"num_proc": 1.0}, "num_proc must be a whole number from 1 on, not 1.0"),
        ({"checkpoint": 5}, "checkpoint must be a directory or a URL, not 5"),
        ({"checkpoint": b"/tmp"}, "checkpoint must be a directory or a URL, not b'/tmp'"),
        ({"checkpoint_keep": 5}, "checkpoint_keep=5 needs checkpoint=, the place where checkpoints are written"),
        ({"checkpoint_interval": 5}, "checkpoint_interval=5 needs checkpoint="),
        ({"checkpoint_interval": -1}, "checkpoint_interval must be a number of seconds from 0 on, not -1"),
        ({"checkpoint_best": "loss"}, "checkpoint_best='loss' needs checkpoint="),
        ({"storage_options": {"anon": True}}, "storage_options needs checkpoint="),
        ({"checkpoint": "/tmp", "storage_options": 5}, "storage_options must be a dict of options, not 5"),
        ({"event_log": 5}, "event_log must be the path of a file, not 5"),
        ({"event_log": ""}, "event_log must be the path of a file, not ''"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_whole_numbers_may_be_numpys(
    arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        spark_elastic.run(int, local=True, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"hang_timeout": -1},
        {"backend": "mpi"},
        {"env": {"A": 1}},
        {"driver_port": 65536},
        {"loggers": [5]},
        {"on_event": 3},
        {"durable": True},
    ],
)
def test_nothing_is_written_to_the_checkpoint_directory_if_an_argument_is_wrong(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        spark_elastic.run(int, local=True, checkpoint=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(launcher: LocalLauncher) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(LocalLauncher, "__enter__", enter)


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("", "event_log='.*' cannot be written: it is a directory; give the path of a file"),
        ("no/log", "event_log='.*/no/log' cannot be written: there is no folder .*/no; create it"),
        ("file/log", "event_log='.*/file/log' cannot be written: there is no folder .*/file; create it"),
        ("sealed/log", "event_log='.*/sealed/log' cannot be written: the folder .*/sealed is not writable"),
        ("closed", "event_log='.*/closed' cannot be written: Permission denied"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_an_event_log_that_cannot_be_written_is_a_wrong_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, complaint: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").touch()
    (tmp_path / "sealed").mkdir()

    def is_allowed(path: str, mode: int) -> bool:  # root may do anything
        return not path.endswith("sealed")

    def open_allowed(path: Any, *arguments: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open(path, *arguments)

    monkeypatch.setattr(os, "access", is_allowed)
    monkeypatch.setattr(run_module, "open", open_allowed, raising=False)
    with pytest.raises(ValueError, match=complaint):
        spark_elastic.run(int, local=True, event_log=tmp_path / place)


@pytest.mark.usefixtures("nothing_starts")
def test_a_log_is_not_made_for_a_job_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backend"):
        spark_elastic.run(int, local=True, event_log=tmp_path / "log", backend="mpi")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_can_no_longer_be_opened_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_module, "EventLog", refuse)
    with pytest.raises(ValueError, match=r"event_log='.*log' cannot be written: No space left on device"):
        spark_elastic.run(int, local=True, min_np=1, max_np=1, event_log=tmp_path / "log")


def test_a_run_in_a_worker_does_not_start_another_spark_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that calls run() where it is imported does so in each worker, too."""
    monkeypatch.setenv(TASK_VARIABLE, "1")
    with pytest.raises(ValueError, match=r"called in a worker.*__main__"):
        spark_elastic.run(print)


class Refusing(TensorBoardLogger):
    def start(self, resumes: str | None) -> None:
        raise RuntimeError(f"no run for {resumes}")


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_loggers_know_a_local_checkpoint_by_its_path_however_it_is_written(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"no run for {tmp_path}/ck$"):
        spark_elastic.run(
            int, local=True, num_proc=1, checkpoint=f"{scheme}{tmp_path}/ck/", loggers=[Refusing("unused")]
        )


def test_loggers_know_a_checkpoint_without_the_secrets_of_its_url() -> None:
    with pytest.raises(RuntimeError, match=r"no run for memory://…@bucket/x$"):
        spark_elastic.run(
            int, local=True, num_proc=1, checkpoint="memory://AK:S3CRET@bucket/x", loggers=[Refusing("unused")]
        )
