"""The store of estimators: its URLs, and what it keeps."""

from __future__ import annotations

import pickle

import pytest

from spark_elastic.estimator import Store


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
