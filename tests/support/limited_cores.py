"""Cores that this process may use, as a test says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from spark_elastic.launchers import defaults


def cores_of(monkeypatch: pytest.MonkeyPatch, cgroup: Path, cores: Iterable[int]) -> None:
    """Let this process run on these cores, and have the quota that is in a folder."""
    monkeypatch.setattr(defaults.os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(defaults, "CGROUP", cgroup)
