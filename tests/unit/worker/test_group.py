"""NCCL's part of a process group, with stand-ins for what needs GPUs."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.group import NCCL_BACKEND, Group


class Nccl:
    """An abort takes until ``kernels`` have ended."""

    def __init__(self) -> None:
        self.kernels = threading.Event()
        self.kernels.set()
        self.is_aborted = False

    def abort(self) -> None:
        assert self.kernels.wait(10)
        self.is_aborted = True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made: Any = Group(None, 0, 1, "127.0.0.1", "nccl", timedelta(seconds=1))  # type: ignore[arg-type]
    made.nccl = Nccl()
    monkeypatch.setattr(made, "_new_nccl", lambda *args: Nccl())
    return made  # type: ignore[no-any-return]


def subgroup(group: Group) -> Any:
    return group.subgroup(NCCL_BACKEND, SimpleNamespace(store=None, group_rank=0, group_size=1))


def test_an_abort_of_nccl_reaches_the_groups_of_user_code_and_does_not_wait(group: Group) -> None:
    groups = [group.nccl, subgroup(group)]
    for each in groups:
        each.kernels.clear()
    threads = group.abort_device()
    assert not any(each.is_aborted for each in groups)
    for each in groups:
        each.kernels.set()
    for thread in threads:
        thread.join()
    assert all(each.is_aborted for each in groups)


def test_the_abort_of_gloo_leaves_nccl_alone(group: Group) -> None:
    group.abort()
    assert group.is_broken()
    assert not group.nccl.is_aborted


def test_a_group_that_user_code_makes_after_the_abort_is_refused(group: Group) -> None:
    group.abort()
    with pytest.raises(WorkerLostError, match="while a group was being built"):
        subgroup(group)


def test_a_group_is_destroyed_after_nccl_has_been_aborted(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch waits for kernels there, which may wait for ranks that are gone."""
    nccl, seen = group.nccl, []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(nccl.is_aborted))
    group.close()
    assert seen == [True]
    assert group.abort_device() == []
