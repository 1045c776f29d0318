"""Iteration: one pass over a loader. A loader has a single position, so other code may end the pass early."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

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


class Current(Generic[T]):
    """The iteration that a loader has begun last. A deep copy of the loader, pickled or not, has begun none.

    It is held weakly, so that an iteration that user code drops is closed, and its reader stopped, immediately.
    """

    def __init__(self) -> None:
        self._iteration: weakref.ref[Iteration[T]] | None = None

    def __reduce__(self) -> tuple[type[Current[T]], tuple[()]]:
        return Current, ()

    def begin(self, batches: Generator[T, None, None]) -> Iteration[T]:
        """Begin an iteration, after the end of the one before."""
        iteration = Iteration(batches)
        self._iteration = weakref.ref(iteration)
        return iteration

    def end(self, by: str = "") -> None:
        """End the iteration, if there is one. ``by`` says what ends it, if user code does not expect this."""
        iteration = self._iteration() if self._iteration is not None else None
        self._iteration = None
        if iteration is not None:
            iteration.end(by)
