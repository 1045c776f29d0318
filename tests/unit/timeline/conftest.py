"""The history of a run that lost a worker and got another one."""

from __future__ import annotations

import pytest
import story
from story import entries

from spark_elastic.timeline.history import History, read_history


@pytest.fixture
def history() -> History:
    return read_history(entries(story.killed()))
