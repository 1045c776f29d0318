"""What the first worker finds out of a dataset, all workers of a job take from it."""

from __future__ import annotations

import threading
from pathlib import Path

from data_worlds import write_dataset

from spark_elastic.data import ParquetLoader
from spark_elastic.data.pinning import key_of, pin, set_pin


def test_the_manifest_and_filter_counts_are_read_once_where_they_are_pinned(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, [5, 6])
    pinned: dict[str, bytes] = {}
    made: list[str] = []

    def pin(key: str, make: object) -> bytes:
        if key not in pinned:
            made.append(key)
            pinned[key] = make()  # type: ignore[operator]
        return pinned[key]

    set_pin(pin)
    try:
        for _ in range(3):
            assert ParquetLoader(root, 4, filters=[("id", "<", 8)]).rows_total == 8
    finally:
        set_pin(None)
    assert [key.split("/")[1] for key in made] == ["manifest", "filter"]


def test_without_a_job_everything_is_computed_each_time() -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(len(made))
        return b"%d" % len(made)

    assert [pin("key", make), pin("key", make)] == [b"1", b"2"]


def test_a_key_is_that_of_the_values_content_and_there_is_none_for_what_cannot_be_pickled() -> None:
    assert key_of(("x", 1)) == key_of(("x", 1)) != key_of(("x", 2))
    assert key_of(threading.Lock()) is None
