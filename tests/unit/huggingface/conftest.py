"""A folder for what Trainers make."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Trainer makes its output_dir here, though it saves nothing."""
    monkeypatch.chdir(tmp_path)
