"""Hypothesis judges what the code does, not how fast the machine is: that is for benchmarks/."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def torchs_threads() -> Iterator[None]:
    """Give later tests the number of threads that torch had: a loader with ``shards=`` takes one for good."""
    torch: Any = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if before is not None:
        torch.set_num_threads(before)
