"""The interface between a loader and the engine that reads row groups for it, and the table of ``ParquetLoader``'s engines."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spark_elastic.data.column_choice import Columns
    from spark_elastic.data.columns import Rows
    from spark_elastic.data.filesystem import Location
    from spark_elastic.data.filters import RowFilter
    from spark_elastic.data.manifest import Manifest

# The modules of ``ParquetLoader``'s engines by name; ``open_engine(reading)`` of a module makes its engine. A module is imported
# when its engine is used.
ENGINES: Mapping[str, str] = {
    "arrow": "spark_elastic.data.arrow_engine",
    "petastorm": "spark_elastic.data.petastorm_engine",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What an engine of ``ParquetLoader`` is to read.

    locations: those of the manifest's URLs. columns: names and patterns, or None for all that can become tensors. row_filter:
    rows that do not pass it count as absent. transform: the user's; each engine says what it takes. options: for this engine
    alone. storage_options: for the library that opens files.
    """

    manifest: Manifest
    locations: Sequence[Location]
    columns: Columns = None
    row_filter: RowFilter | None = None
    transform: object = None
    options: Mapping[str, object] | None = None
    storage_options: Mapping[str, object] | None = None


class Engine(Protocol):
    """Reads decoded rows of row groups, which are named by their index in the manifest.

    Used by one thread at a time. All failures are raised as DataErrors that name the file.
    """

    @property
    def row_bytes(self) -> float:
        """The size of a decoded row in bytes, if the dataset's schema determines it; else 0."""

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        """Yield rows [start, stop) of a row group in their order, about ``chunk`` at a time.

        start, stop: positions among the rows that pass the filters. An engine holds no more than a few chunks in memory, if the
        format allows that. The iterator may be abandoned before its end.
        """

    def expect(self, group: int) -> None:
        """Note that a row group will be needed soon, and perhaps begin to read it."""

    def close(self) -> None:
        """Close files and helpers. A later ``read`` opens what it needs again."""


def open_engine(name: str, reading: Reading) -> Engine:
    """Make a ``ParquetLoader``'s engine of this name. Raises ValueError or TypeError for arguments that it does not take."""
    engine: Engine = importlib.import_module(ENGINES[name]).open_engine(reading)
    return engine
