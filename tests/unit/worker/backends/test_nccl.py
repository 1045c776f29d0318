"""Nccl without a GPU: how its groups end, and where it cannot be used."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_groups import OfGpus, group_of_gpus, of_device

from spark_elastic.worker.backends.nccl import Nccl
from spark_elastic.worker.group import Group


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return group_of_gpus(monkeypatch)


def nccl() -> Any:
    return Nccl(dist.HashStore(), 0, 1, "127.0.0.1", timedelta(seconds=1))  # type: ignore[arg-type]


def test_a_build_that_fails_while_another_is_being_freed_ends_when_that_is_done(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may have had too little memory for both, and the next world is tried at once."""
    device = of_device(group).group
    device.kernels.clear()
    group.close()

    def lack_memory(*_: object) -> None:
        threading.Timer(0.2, device.kernels.set).start()
        raise dist.DistBackendError("NCCL error: out of memory")

    monkeypatch.setattr(Nccl, "_new", lack_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        Nccl(dist.HashStore(), 0, 1, "127.0.0.1", timedelta(seconds=1)).build()  # type: ignore[arg-type]
    assert device.is_aborted


def test_an_abort_reaches_all_groups_at_once_although_one_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nccl, "_new", lambda *args: OfGpus())
    backend = nccl()
    backend.build()
    slow, quick = backend.group, backend.subgroup(dist.HashStore(), 0, 1)
    slow.kernels.clear()
    threads = backend.abort()
    threads[1].join(10)
    assert (slow.is_aborted, quick.is_aborted) == (False, True)
    assert not any(thread.daemon for thread in threads), "the process would end under an abort"
    assert threads[0] in Nccl._aborting
    slow.kernels.set()
    for thread in threads:
        thread.join(10)
    assert slow.is_aborted
    nccl().abort()
    assert Nccl._aborting == [], "those that have ended are forgotten"


def test_what_is_closed_is_kept_until_it_is_dropped_and_not_aborted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nccl, "_new", lambda *args: OfGpus())
    backend = nccl()
    backend.build()
    groups = [backend.group, backend.subgroup(dist.HashStore(), 0, 1)]
    backend.close()
    assert backend.group is None
    assert backend._remains == groups
    assert backend.abort() == []
    backend.drop()
    assert backend._remains == []


def test_torchs_watchdog_and_monitor_are_off_when_a_group_is_made_and_what_the_user_has_chosen_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "NCCL_SOCKET_IFNAME")
    seen: list[list[str | None]] = []

    class OfTorch:
        Options = SimpleNamespace

        def __init__(self, *args: object) -> None:
            seen.append([os.environ.get(name) for name in names])

        def eager_connect_single_device(self, device: torch.device) -> None:
            pass

    monkeypatch.setattr(dist, "ProcessGroupNCCL", OfTorch, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in (*names, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        del os.environ[name]
    nccl().build()
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    nccl().build()
    assert seen == [["0", "0", "=lo"], ["0", "1", "eth7"]]
