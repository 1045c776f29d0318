"""A machine with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from limited_cores import cores_of

from spark_elastic.task import facts


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, and a torch that can use them."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(facts.importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cores_of(monkeypatch, tmp_path, range(8))
