"""What the fixtures of whole jobs give to tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import spark_elastic
from spark_elastic.protocol.event_format import as_event, read_event
from spark_elastic.protocol.records import Unknown
from spark_elastic.testing import Fault, inject

SUPPORT = Path(__file__).parent
# How many steps a job makes, unless its test says otherwise.
STEPS = 60


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
    def steps(self) -> int:
        """Those that rank 0 says it has made, where the function is ``count_steps``."""
        return len(self.results[0]["history"])

    @property
    def faults(self) -> int:
        return len(self.of("fault_injected"))


def runner(**where: Any) -> Callable[..., Any]:
    """Return ``run(fn, *args, faults=[…], **settings)``, which runs jobs where the keywords say and checks what they log."""

    def call(fn: Callable[..., Any], *args: Any, faults: list[Fault] | None = None, **settings: Any) -> Run:
        events: list[dict[str, Any]] = []
        watch = settings.pop("on_event", None)

        def note(event: dict[str, Any]) -> None:
            events.append(event)
            if watch is not None:
                watch(event)

        try:
            with inject(*(faults or [])):
                results = spark_elastic.run(fn, args=args, on_event=note, **where, **settings)
        except BaseException as error:
            error.events = events  # type: ignore[attr-defined]
            raise
        entries = [read_event(event) for event in events]
        assert not [entry for entry in entries if isinstance(entry.record, Unknown)], (
            "kinds that docs/events.md does not know"
        )
        assert [as_event(entry) for entry in entries] == events, "fields that docs/events.md does not know"
        return Run(results, events)

    return call


def check(run: Any, steps: int = STEPS) -> None:
    """Every committed step counted once, on every rank; all ranks equal; ranks dense and in order."""
    results = run.results
    assert [result["rank"] for result in results] == list(range(len(results)))
    for result in results:
        assert result["history"] == list(range(1, steps + 1))
        assert result["counter"] == steps
        assert result["size"] == len(results)
    assert len({result["digest"] for result in results}) == 1
    assert len({result["generation"] for result in results}) == 1
