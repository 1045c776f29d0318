"""Iteration: one pass over a loader. A loader has a single position, so other code may end the pass early."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import TypeVar

from spark_elastic.errors import DataError

T = TypeVar("T")


class Iteration(Iterator[T]):
    """Yields the batches of a generator. When the iteration is dropped, the generator is closed and its reader stopped."""

    def __init__(self, batches: Generator[T, None, None]) -> None:
        self._batches = batches
        self._ended_by = ""

    def __next__(self) -> T:
        if self._ended_by:
            raise DataError(
                f"{self._ended_by}, which ended this iteration before the epoch's end: a loader has one position. Make another "
                "loader if rows should be read twice at a time"
            )
        return next(self._batches)

    def end(self, by: str = "") -> None:
        """Close the generator. With ``by``, requesting another batch is then an error, unless none was left."""
        if inspect.getgeneratorstate(self._batches) != inspect.GEN_CLOSED:
            self._ended_by = by
        self._batches.close()
