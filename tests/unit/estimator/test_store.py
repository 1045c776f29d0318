"""The store of estimators: its URLs, and what it keeps."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.estimator import Store
from spark_elastic.estimator.files import ArrowFiles
from spark_elastic.estimator.store import full_url


@pytest.mark.parametrize(
    ("url", "spark", "worker"),
    [
        ("/data/store", "file:///data/store", "file:///data/store"),
        ("file:/data/store", "file:///data/store", "file:///data/store"),
        ("s3a://bucket/x/", "s3a://bucket/x", "s3://bucket/x"),
        ("s3://bucket/x", "s3a://bucket/x", "s3://bucket/x"),
        ("hdfs://host:8020/x", "hdfs://host:8020/x", "hdfs://host:8020/x"),
        ("dbfs:/x/y", "dbfs:/x/y", "file:///dbfs/x/y"),
        ("gcs://bucket/x", "gs://bucket/x", "gs://bucket/x"),
        ("abfss://box@account.dfs.core.windows.net/x",) * 3,
    ],
)
def test_spark_and_workers_meet_in_the_store(url: str, spark: str, worker: str) -> None:
    store = Store.create(url)
    assert (store.spark_url(), store.worker_url()) == (spark, worker)
    assert pickle.loads(pickle.dumps(store)) == store


def test_a_store_keeps_what_it_is_told() -> None:
    assert Store.create("/x").keep == {"data", "checkpoints", "logs"}
    assert Store.create("/x", keep=False).keep == set()
    assert Store.create("/x", keep="data").keep == {"data"}
    for wrong in ("all", 3):
        with pytest.raises(ValueError, match=f"keep must be True, False or some of .* not {wrong!r}"):
            Store.create("/x", keep=wrong)
    with pytest.raises(ValueError, match="not 'a/b'"):
        Store.create("/x").run_url("a/b")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a run and data, whose files are opened as with Spark Connect."""
    monkeypatch.setattr("spark_elastic.estimator.store.open_files", ArrowFiles)
    store = Store.create(tmp_path)
    for url in (f"{store.run_url('one')}/run.json", f"{store.log_url('two')}/log", f"{store.data_url}/plan-1/part"):
        store.files.write(url, b"")
    return store


def test_a_run_is_deleted_with_all_that_it_has_and_without_the_data(opened: Store, tmp_path: Path) -> None:
    assert opened.runs() == ["one", "two"]
    opened.delete("one")
    assert opened.runs() == ["two"]
    assert (tmp_path / "data/plan-1/part").exists()
    with pytest.raises(KeyError, match=r"there is no run 'one' in file:///.*; there are: two"):
        opened.delete("one")
    opened.delete_data()
    assert not (tmp_path / "data").exists()


def test_a_store_that_cannot_be_written_is_named_and_one_that_can_is_left_as_it_was(
    opened: Store, tmp_path: Path
) -> None:
    session: Any = SimpleNamespace(conf={"spark.master": "local[2]"})
    before = sorted(tmp_path.rglob("*"))
    opened.check(session)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the store file:///.*/file/deep cannot be written: "):
        Store.create(tmp_path / "file/deep").check(session)


def test_a_place_has_one_url_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert full_url("a/../b") == full_url("~/b") == full_url(f"FILE:{tmp_path}//b/") == f"file://{tmp_path}/b"
    assert full_url("S3A://Bucket/x/") == full_url("s3n://Bucket/x") == "s3://Bucket/x"
    with pytest.raises(ValueError, match="a URL must not be empty"):
        full_url("")
