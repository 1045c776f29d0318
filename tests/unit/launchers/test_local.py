"""Slots on this machine: how many there are, which GPUs they have, and what becomes of processes that fail."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from limited_cores import cores_of
from local_clusters import numbers

import spark_elastic
from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers import defaults, local
from spark_elastic.launchers.base import SlotListener
from spark_elastic.launchers.local import LocalLauncher, LocalSlots
from spark_elastic.launchers.local_cluster import LocalCluster
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.ticket import Ticket

SECONDS = 30.0  # only a failing test waits for so long
TICKET = Ticket("1", (("127.0.0.1", 1),), Credentials(b"", b""), None)


@pytest.mark.usefixtures("two_gpus")
def test_where_there_are_gpus_each_slot_has_one() -> None:
    with LocalLauncher(True) as launcher:
        assert launcher.sizes(None, None, None) == (2, 2, 2)
        slots = launcher.launch(TICKET, 2, SlotListener(print, print, print, print))
    assert [seat.gpus for _ in range(2) if (seat := slots._cluster.acquire())] == [("GPU-a",), ("GPU-b",)]


@pytest.mark.usefixtures("two_gpus")
def test_more_workers_than_gpus_are_refused_and_an_empty_variable_means_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalLauncher(True) as launcher, pytest.raises(ValueError, match=r"max_np=3 is more than the 2 GPUs"):
        launcher.sizes(None, None, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with LocalLauncher(True) as launcher:
        assert launcher.sizes(None, None, 3) == (3, 3, 3)


def test_sizes_come_from_the_cores_or_from_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_gpus", lambda: ())
    cores_of(monkeypatch, tmp_path, {0, 1, 5})
    with LocalLauncher(True) as launcher:
        assert launcher.sizes(None, None, None) == (3, 3, 3)
        assert launcher.sizes(None, 1, None) == (1, 1, 3)
        assert launcher.sizes(8, None, None) == (8, 8, 8)
        with pytest.raises(ValueError, match="max_np=1000000000 processes are more than a machine can have"):
            launcher.sizes(None, 1, 10**9)
    with LocalLauncher(LocalCluster(5)) as launcher:
        assert launcher.sizes(None, 2, None) == (2, 2, 5)


def test_spark_and_local_together_and_other_values_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="give either spark or local"):
        spark_elastic.run(print, spark=object(), local=True)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"local must be True, False, or a cluster of spark_elastic.testing.local_cluster, not 3"
    ):
        spark_elastic.run(print, local=3)  # type: ignore[arg-type]


class Heard:
    """What slots tell, with the moments at which something can be waited for."""

    def __init__(self) -> None:
        self.given_up: list[tuple[int, str]] = []
        self.stopped: list[str] = []
        self.has_stopped = threading.Event()
        self.listener = SlotListener(
            on_stopped=self._stop,
            on_failed=lambda reason: self._stop(f"failed: {reason}"),
            on_draining=lambda slot: None,
            on_given_up=lambda slot, why: self.given_up.append((slot, why)),
        )

    def _stop(self, reason: str) -> None:
        self.stopped.append(reason)
        self.has_stopped.set()


def interpreter(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_process_that_fails_before_it_registers_is_given_up_with_its_last_lines_and_in_the_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "RESUBMIT_SECONDS", 0.01)
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "echo libtorch.so is damaged >&2; exit 3"))
    heard = Heard()
    with LocalSlots(LocalCluster(1), TICKET, 1, heard.listener):
        assert heard.has_stopped.wait(SECONDS)
    assert (
        heard.given_up
        == [(0, "the process that slots are forked from ended with exit code 3\nlibtorch.so is damaged")] * 3
    )
    assert heard.stopped == [
        "failed: slot 0 failed 3 times: the process that slots are forked from ended with exit code 3\nlibtorch.so is damaged"
    ]


def test_a_process_that_cannot_be_started_is_given_up_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(defaults, "RESUBMIT_SECONDS", 0.01)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    heard, cluster = Heard(), LocalCluster(1)
    with LocalSlots(cluster, TICKET, 1, heard.listener):
        assert heard.has_stopped.wait(SECONDS)
    assert "No such file or directory: '/nowhere/python'" in heard.given_up[0][1]
    assert numbers(cluster, 1) == [0], "its seat is free again"


def test_a_closed_cluster_ends_the_job_and_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "END_SECONDS", 0.0)
    monkeypatch.setattr(local, "KILL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, f"echo started >> {tmp_path}/log; exec sleep 1000"))
    heard, cluster = Heard(), LocalCluster(1)
    with LocalSlots(cluster, TICKET, 3, heard.listener):
        cluster.close()
        assert heard.has_stopped.wait(SECONDS)
    assert heard.stopped == ["the local cluster was closed"]
    assert cluster.slots == 1


def test_a_job_that_has_given_its_slots_back_starts_none_for_a_while_though_there_is_room() -> None:
    heard, cluster = Heard(), LocalCluster(1)
    slots = LocalSlots(cluster, TICKET, 1, heard.listener)
    slots._give_back = True
    pause = slots._look(100.0)
    assert pause is not None
    assert defaults.YIELD_SECONDS[0] <= pause <= defaults.YIELD_SECONDS[1]
    assert numbers(cluster, 1) == [0]


def test_what_is_asked_of_slots_that_have_ended_is_nothing_to_them() -> None:
    cluster = LocalCluster(1)
    cluster.take_away()
    with LocalSlots(cluster, TICKET, 1, Heard().listener) as slots:
        pass
    slots.give_back()


def test_a_deleted_working_directory_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SparkElasticError, match="working directory of this process has been deleted"):
        spark_elastic.run(int, local=True)
