"""What torch says of a GPU's use."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.protocol.reports import GpuUsed
from spark_elastic.worker.gpu import use_of_gpu


def test_memory_is_told_where_nvml_tells_no_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    def percent() -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", percent)
    assert use_of_gpu() == GpuUsed(2**30, None)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 87)
    assert use_of_gpu() == GpuUsed(2**30, 87)
