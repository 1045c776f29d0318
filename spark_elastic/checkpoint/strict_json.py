"""Parses JSON strictly: accepts what we write, and rejects the deviations that Python's parser tolerates."""

from __future__ import annotations

import json
from typing import Any

from spark_elastic._json import Json


def load_json(data: bytes) -> Any:
    """Parse JSON strictly: names are unique and numbers finite. Raises ``ValueError`` or ``RecursionError``."""
    return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
