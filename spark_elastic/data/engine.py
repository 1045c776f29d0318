"""The seam between a loader and what reads row groups for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from spark_elastic.data.columns import Rows


class Engine(Protocol):
    """Reads decoded rows of row groups, named by their index in the manifest.

    Used by one thread at a time. Failures of any kind are DataErrors that name the file.
    """

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        """Yield rows [start, stop) of a row group in their order, about `chunk` at a time.

        start, stop count the rows that pass the filters. Holds no more than a few chunks in memory, where the
        format allows it. The iterator may be abandoned.
        """
        ...

    def expect(self, group: int) -> None:
        """Hear that a row group will be needed soon; may start reading it."""
        ...

    def close(self) -> None:
        """Close files and helpers; `read` opens what it needs again."""
        ...
