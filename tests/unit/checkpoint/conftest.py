"""A stage for states, and a checkpoint to tamper with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tampered_checkpoint import Saved
from worker_stage import Stage, on_writing_stage


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "saved")


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_writing_stage() as stage:
        yield stage


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "saved")
