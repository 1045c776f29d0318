"""Datasets in object stores: S3 as a server of this machine plays it, through fsspec's driver and through pyarrow's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from data_worlds import make_table, write_dataset

from spark_elastic.data import ParquetLoader, read_manifest
from spark_elastic.errors import DataError

moto_server = pytest.importorskip("moto.server")

ROWS = [30, 1, 57, 12]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path) -> pafs.FileSystem:
    """The directory /bucket/data with a dataset in two files, a hidden file and a partition's directory."""
    write_dataset(tmp_path / "data", ROWS)
    store = pafs.S3FileSystem(
        access_key="k", secret_key="s", endpoint_override=endpoint, scheme="http", region="us-east-1",
        allow_bucket_creation=True, allow_bucket_deletion=True,
    )  # fmt: skip
    store.create_dir("bucket")
    pafs.copy_files(str(tmp_path / "data"), "bucket/data", destination_filesystem=store)
    with store.open_output_stream("bucket/data/_SUCCESS") as empty:
        empty.write(b"")
    yield store
    store.delete_dir("bucket")


Place = tuple[str, dict[str, Any] | None]


@pytest.fixture(params=["s3fs", "pyarrow, by its URL", "pyarrow, by storage_options"])
def place(request: Any, endpoint: str, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Place]:
    """Return (URL, storage_options) of a key, for each of the ways to open it."""
    if request.param == "s3fs":
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://{endpoint}", "skip_instance_cache": True}
        return lambda key: (f"s3://{key}", options)
    query = f"?endpoint_override={endpoint}&scheme=http&region=us-east-1"
    if request.param == "pyarrow, by its URL":
        return lambda key: (f"s3://k:s@{key}{query}", None)
    without(monkeypatch, "s3", "s3fs")
    arguments = {"access_key": "k", "secret_key": "s", "endpoint_override": endpoint, "scheme": "http"}
    return lambda key: (f"s3://{key}", {**arguments, "region": "us-east-1"})


def without(monkeypatch: pytest.MonkeyPatch, scheme: str, module: str) -> None:
    """Have a driver of fsspec not be installed."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


def test_row_groups_are_listed_and_every_row_is_read_once(place: Callable[[str], Place]) -> None:
    url, options = place("bucket/data")
    manifest = read_manifest(url, storage_options=options)
    assert [(group.path, group.rows) for group in manifest] == [
        ("part-0.parquet", 30),
        ("part-0.parquet", 1),
        ("part-1.parquet", 57),
        ("part-1.parquet", 12),
    ]
    assert sorted(ids(ParquetLoader(url, 16, storage_options=options))) == list(range(100))


def test_a_position_goes_on_in_a_larger_world(place: Callable[[str], Place]) -> None:
    url, options = place("bucket/data")
    first = ParquetLoader(url, global_batch_size=20, storage_options=options)
    seen = next(iter(first))["id"].tolist()
    state = first.state_dict()
    first.close()
    for rank in range(2):
        loader = ParquetLoader(url, global_batch_size=20, storage_options=options)
        loader.load_state_dict(state)
        loader.set_world(rank, 2)
        seen += ids(loader)
    assert sorted(seen) == list(range(100))


def test_an_object_that_is_replaced_or_deleted_is_named(place: Callable[[str], Place], bucket: Any) -> None:
    url, options = place("bucket/data")
    loader = ParquetLoader(url, 16, storage_options=options)
    with bucket.open_output_stream("bucket/data/part-1.parquet") as file:
        pq.write_table(make_table(np.arange(69) + 9), file)
    with pytest.raises(DataError, match=r"data/part-1\.parquet has changed since the dataset was listed"):
        ids(loader)
    bucket.delete_file("bucket/data/part-1.parquet")
    with pytest.raises(DataError, match=r"data/part-1\.parquet.*(gone|cannot be read)"):
        ids(loader)
    loader.close()


def test_a_key_or_bucket_that_is_not_there_is_named(place: Callable[[str], Place]) -> None:
    for key in ("bucket/nowhere", "no-such-bucket/data"):
        url, options = place(key)
        with pytest.raises(DataError, match=key):
            read_manifest(url, storage_options=options)


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "gs", "gcsfs")
    without(monkeypatch, "s3", "s3fs")
    without(monkeypatch, "abfs", "adlfs")
    with pytest.raises(DataError, match="pip install gcsfs"):
        read_manifest("gs://bucket/data", storage_options={"token": "anon"})
    with pytest.raises(DataError, match="pip install s3fs"):
        read_manifest("s3://bucket/data", storage_options={"anon": True})
    with pytest.raises(DataError, match="adlfs"):
        read_manifest("abfs://container/data")


def test_hdfs_without_a_hadoop_client_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match=r"hdfs://namenode/data cannot be opened: .*libhdfs.*HADOOP_HOME") as failure:
        read_manifest("hdfs://namenode/data")
    assert len(str(failure.value)) < 300
