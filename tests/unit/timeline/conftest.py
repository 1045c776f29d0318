"""The log and the history of a run that lost a worker and got another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import story
from story import entries

from spark_elastic.timeline.history import History, read_history


@pytest.fixture
def history() -> History:
    return read_history(entries(story.killed()))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in story.killed()))
    return path
