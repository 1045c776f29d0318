"""What the fixtures of whole jobs give to tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent


class Run:
    """What came out of a run."""

    def __init__(self, results: list[Any], events: list[dict[str, Any]]) -> None:
        self.results = results
        self.events = events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def sizes(self) -> list[int]:
        return [event["size"] for event in self.of("world_formed")]

    @property
    def faults(self) -> int:
        return len(self.of("fault_injected"))
