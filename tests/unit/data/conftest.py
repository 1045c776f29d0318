"""A dataset of uneven row groups, and a look at the threads that a test leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_worlds import write_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", [30, 1, 0, 57, 12, 100, 3], files=3)


@pytest.fixture
def no_thread_stays_behind() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("spark-elastic")] == []
