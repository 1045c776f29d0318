"""One pass over a loader, which other code may end."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.data import ParquetLoader
from spark_elastic.data.iteration import Iteration
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


@pytest.mark.parametrize(
    ("interrupt", "why"),
    [
        (lambda loader: list(loader), "another iteration over this loader was begun"),
        (lambda loader: loader.load_state_dict(loader.state_dict()), "the loader went to a saved position"),
        (lambda loader: loader.set_epoch(1), r"set_epoch\(1\) was called"),
    ],
)
def test_a_loader_whose_iteration_something_else_ends_says_so_instead_of_ending_the_epoch_early(
    dataset: Path, interrupt: Any, why: str
) -> None:
    loader = ParquetLoader(dataset, 16)
    iterator = iter(loader)
    next(iterator)
    interrupt(loader)
    with pytest.raises(DataError, match=f"{why}, which ended this iteration before the epoch's end"):
        next(iterator)
    with pytest.raises(DataError, match="another iteration over this loader was begun"):
        list(zip(loader, loader, strict=True))


def test_an_iteration_that_is_complete_or_closed_has_no_more_batches_and_raises_nothing(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    complete, at_its_end = iter(loader), None
    list(complete)
    at_its_end = iter(loader)
    for _ in range(len(loader)):
        next(at_its_end)
    loader.set_epoch(1)
    closed = iter(loader)
    next(closed)
    loader.close()
    list(loader)
    assert [next(each, None) for each in (complete, at_its_end, closed)] == [None] * 3


class Reader:
    """Batches of a reader that has to be closed."""

    def __init__(self) -> None:
        self.is_open = True

    def batches(self) -> Generator[int, None, None]:
        try:
            yield from range(3)
        finally:
            self.is_open = False


def test_the_reader_is_closed_when_an_iteration_is_dropped_or_ended() -> None:
    dropped, ended = Reader(), Reader()
    iteration = Iteration(dropped.batches())
    assert next(iteration) == 0
    del iteration
    assert not dropped.is_open
    other = Iteration(ended.batches())
    assert next(other) == 0
    other.end()
    assert not ended.is_open
    assert list(other) == []
