"""Data that fits write to the store: which are found again, which are gone, and which nobody needs any more."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.estimator import Store
from spark_elastic.estimator.dataset import ABANDONED_SECONDS, Dataset, Split, Wanted, check_names, written
from spark_elastic.estimator.files import ArrowFiles

# Data that are found need no DataFrame.
NO_FRAME: Any = None
FOUND = Wanted(NO_FRAME, ["x"], Split(), 2)


@pytest.fixture(autouse=True)
def without_a_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores open their files as they do with Spark Connect."""
    monkeypatch.setattr("spark_elastic.estimator.store.open_files", ArrowFiles)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path)


def write(store: Store, token: str, identity: str = "plan-1", *, rows: int = 4, **facts: Any) -> Dataset:
    """Write training data of so many rows as a fit for two files does."""
    data = Dataset(f"{store.data_url}/{identity}-2/{token}", rows, 0, facts, identity)
    folder = folder_of(data)
    (folder / "_split=0").mkdir(parents=True)
    pq.write_table(pa.table({"x": [0.0] * rows}), folder / "_split=0/part.parquet")
    (folder / "_complete.json").write_text(json.dumps(asdict(data)))
    return data


def folder_of(data: Dataset) -> Path:
    return Path(data.url.removeprefix("file://"))


def test_data_of_the_same_identity_are_found_and_not_written_again(store: Store) -> None:
    kept = write(store, "a")
    with written(FOUND, store, "plan-1") as found:
        assert found == kept
    assert folder_of(kept).exists()


def test_data_are_deleted_after_their_last_fit_if_the_store_keeps_none(store: Store, tmp_path: Path) -> None:
    data, passing = write(store, "a"), Store.create(tmp_path, keep=False)
    with written(FOUND, store, "plan-1"):
        with written(FOUND, passing, "plan-1") as found:
            assert found == data
        assert folder_of(data).exists(), "the other fit reads them"
        with pytest.raises(ZeroDivisionError), written(FOUND, passing, "plan-1"):
            raise ZeroDivisionError
    assert folder_of(data).exists(), "the fit whose store keeps data was the last"
    with written(FOUND, passing, "plan-1", known=data.url):
        pass
    assert not folder_of(data).parent.exists()


def test_data_of_a_fit_that_failed_stay_where_its_run_may_go_on(store: Store, tmp_path: Path) -> None:
    data, passing = write(store, "a"), Store.create(tmp_path, keep=False)
    again: dict[str, Any] = {"known": data.url, "keep_on_failure": True}
    with pytest.raises(ZeroDivisionError), written(FOUND, passing, "plan-1", **again):
        raise ZeroDivisionError
    assert folder_of(data).exists()
    with written(FOUND, passing, "plan-1", **again):
        pass
    assert not folder_of(data).exists()


def test_a_run_does_not_go_on_without_all_of_its_data(store: Store) -> None:
    data = write(store, "a")
    pq.write_table(pa.table({"x": [0.0] * 3}), folder_of(data) / "_split=0/part.parquet")
    with (
        pytest.raises(ValueError, match=r"the run cannot go on: of its data in .* files are missing"),
        written(FOUND, store, "plan-1", known=data.url),
    ):
        pass
    (folder_of(data) / "_complete.json").unlink()
    with (
        pytest.raises(ValueError, match=r"the run cannot go on: its data in .* are gone"),
        written(FOUND, store, "plan-1", known=data.url),
    ):
        pass


class Writes(Exception):
    """The DataFrame is read."""


class Frame:
    """A DataFrame whose rows nobody may need."""

    def __getattr__(self, name: str) -> Any:
        raise Writes


FRAME: Any = Frame()
READ = Wanted(FRAME, ["x"], Split(), 2)
DESCRIBED = replace(READ, described=["x"])


def test_data_that_lack_rows_or_facts_are_written_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    write(store, "a")
    with pytest.raises(Writes), written(DESCRIBED, store, "plan-1"):
        pass
    assert not caplog.messages
    described = write(store, "b", x={"min": 0.0})
    with written(DESCRIBED, store, "plan-1") as found:
        assert found == described
    for token in "ab":
        (folder_of(described).parent / token / "_split=0/part.parquet").unlink()
    with pytest.raises(Writes), written(READ, store, "plan-1"):
        pass
    assert len(caplog.messages) == 2
    assert all("files are missing; they are written again" in message for message in caplog.messages)


def test_what_a_dead_writer_left_is_removed_once_it_is_old_and_not_before(store: Store) -> None:
    kept = write(store, "a")
    left = folder_of(kept).parent / "b"
    left.mkdir()
    (left / "part.parquet").touch()
    for age, is_left in ((0.0, True), (ABANDONED_SECONDS + 100, False)):
        for path in (left / "part.parquet", left):
            os.utime(path, (time.time() - age,) * 2)
        # A fit of another identity in the same folder finds nothing, and looks at all that is there.
        with pytest.raises(Writes), written(DESCRIBED, store, "plan-1"):
            pass
        assert left.exists() is is_left
    assert folder_of(kept).exists()


def test_the_folders_of_training_and_of_validation_are_those_of_the_split() -> None:
    data = Dataset("s3://bucket/data/plan-1-2/a", 10, 0)
    assert (data.training_url, data.validation_url) == ("s3://bucket/data/plan-1-2/a/_split=0", None)
    assert Dataset(data.url, 10, 3).validation_url == "s3://bucket/data/plan-1-2/a/_split=1"
    assert [Split().is_wanted, Split(0.1).is_wanted, Split(indicator="held").is_wanted] == [False, True, True]


def test_the_name_of_the_stores_own_column_is_refused() -> None:
    check_names(["x", "split"])
    with pytest.raises(
        ValueError, match=r"column '_split' cannot be trained on, .* df.withColumnRenamed\('_split', …\)"
    ):
        check_names(["x", "_split"])
    for name in ("__spark_elastic_key", "__Spark_Elastic_Stratum"):
        with pytest.raises(ValueError, match=f"column '{name}' cannot be trained on"):
            check_names([name])
