"""Groups with a stand-in for NCCL's, which needs GPUs."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from spark_elastic.worker.backends.nccl import Nccl
from spark_elastic.worker.group import Group


class OfGpus:
    """Stands for NCCL's process group. An abort takes until ``kernels`` have ended."""

    def __init__(self) -> None:
        self.kernels = threading.Event()
        self.kernels.set()
        self.is_aborted = False

    def abort(self) -> None:
        assert self.kernels.wait(10)
        self.is_aborted = True


def of_device(group: Group) -> Any:
    return group._device


def group_of_gpus(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Make a group of one rank, whose device's part is a stand-in."""
    monkeypatch.setattr(Nccl, "_new", lambda *args: OfGpus())
    monkeypatch.setattr(Nccl, "why_unavailable", lambda: "")
    made = Group(None, 0, 1, "127.0.0.1", "nccl", timedelta(seconds=1))  # type: ignore[arg-type]
    of_device(made).group = OfGpus()
    return made
