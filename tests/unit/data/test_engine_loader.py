"""EngineLoader: a loader of another format is an engine, and a class that counts its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from data_worlds import World

from spark_elastic.data.columns import Rows
from spark_elastic.data.engine_loader import EngineLoader
from spark_elastic.data.order import choose_spec, describe
from spark_elastic.data.plan import BatchPlan
from spark_elastic.data.tracker import RowGroupTracker
from spark_elastic.errors import DataError

FILES = [7, 0, 12, 5, 9]


class Numbers:
    """An engine whose rows are numbers, consecutive through all row groups; ``missing`` rows of the last one are not there."""

    row_bytes = 8.0

    def __init__(self, rows: Sequence[int], missing: int = 0) -> None:
        self._first = np.cumsum([0, *rows])
        self._end = int(self._first[-1]) - missing
        self.is_open = False

    def read(self, group: int, start: int, stop: int, chunk: int) -> Iterator[Rows]:
        self.is_open = True
        for begin in range(start, stop, chunk):
            index = np.arange(begin, min(begin + chunk, stop), dtype=np.int64)
            index = index[self._first[group] + index < self._end]
            yield Rows(group, index, index, {"id": self._first[group] + index})

    def expect(self, group: int) -> None: ...

    def close(self) -> None:
        self.is_open = False


class NumbersLoader(EngineLoader):
    def __init__(
        self, engine: Numbers, *, batch: int, seed: int = 3, files: list[int] = FILES, row_bytes: float = 8.0
    ) -> None:
        rows, plan = np.array(files, np.int64), BatchPlan(None, batch)
        spec = choose_spec(
            groups=len(files), batch=plan.smallest, seed=seed, shuffle=True, shuffle_rows=None, row_bytes=row_bytes
        )
        identity = {"kind": "numbers", "dataset": "", "rows": int(rows.sum()), "seed": seed, "order": describe(spec)}
        super().__init__(
            RowGroupTracker(rows, spec, plan), identity, engine, lambda group: f"file {group}", row_bytes=row_bytes
        )


def test_every_row_of_another_format_counts_once_through_changes_of_the_world() -> None:
    world = World(lambda: NumbersLoader(Numbers(FILES), batch=4), 2)
    world.step()
    world.commit()
    world.step()  # is lost with the worker
    world.form(3, keep=1)
    while world.step() is not None:
        pass
    world.commit()
    assert world.counted == {(0, row): 1 for row in range(sum(FILES))}
    world.close()


def test_rows_that_an_engine_does_not_find_are_missed_by_the_name_of_their_file() -> None:
    with pytest.raises(DataError, match="file 4 ended before row 9"):
        list(NumbersLoader(Numbers(FILES, missing=1), batch=4))


def test_files_are_closed_at_the_end_of_an_epoch_and_with_the_loader() -> None:
    engine = Numbers(FILES)
    loader = NumbersLoader(engine, batch=4)
    assert sum(len(batch["id"]) for batch in loader) == sum(FILES)
    assert not engine.is_open
    next(iter(loader))
    loader.close()
    assert not engine.is_open


@pytest.mark.parametrize(("row_bytes", "most"), [(2000.0, 4500), (4000.0, 1048)])
def test_small_row_groups_are_decoded_at_once_and_large_ones_in_pieces(
    row_bytes: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [5000, 4000]
    read, found = Numbers.read, []

    def counted(self: Numbers, *place: int) -> Iterator[Rows]:
        for rows in read(self, *place):
            found.append(len(rows))
            yield rows

    monkeypatch.setattr(Numbers, "read", counted)
    loader = NumbersLoader(Numbers(files), batch=100, files=files, row_bytes=row_bytes)
    assert sum(len(batch["id"]) for batch in loader) == sum(found) == sum(files)
    assert max(found) == most
