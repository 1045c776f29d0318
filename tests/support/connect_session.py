"""A session of Spark Connect, as far as its address and its settings go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def session(endpoint: str | None, **settings: str) -> Any:
    builder = SimpleNamespace() if endpoint is None else SimpleNamespace(endpoint=endpoint)
    conf = {name.replace("_", "."): value for name, value in settings.items()}
    return SimpleNamespace(client=SimpleNamespace(_builder=builder), conf=conf)
