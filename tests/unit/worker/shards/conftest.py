"""No test of shards finds what another one has left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from spark_elastic.data.deliveries import deliveries
from spark_elastic.worker.shards.loops import loops


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No batch of another test has been delivered, and no loop stays open."""
    monkeypatch.setattr(deliveries, "_kept", deque(maxlen=16))
    monkeypatch.setattr(deliveries, "trainer", 0)
    monkeypatch.setattr(deliveries, "is_in_loop", False)
    yield
    loops.abandon()
