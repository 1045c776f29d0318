"""A machine with GPUs, and a place for the process that a run leaves for the next one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from limited_cores import cores_of

from spark_elastic.launchers.kept import KeptParent
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


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptParent]:
    """A place to keep a process in; processes are ones that only wait."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    kept = KeptParent()
    yield kept
    kept.end()
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]
