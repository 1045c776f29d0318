"""Datasets in object stores, as servers of this machine play them: S3 through fsspec's driver and through pyarrow's own, GCS
through fsspec's."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from data_worlds import make_table, write_dataset
from loaded_rows import ids

from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.data import ParquetLoader, read_manifest
from spark_elastic.errors import DataError

moto_server = pytest.importorskip("moto.server")

ROWS = [30, 1, 57, 12]


@dataclass
class Store:
    """A store with a bucket, and how its keys are opened."""

    files: pafs.FileSystem
    place: Callable[[str], tuple[str, dict[str, Any] | None]]


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def gcs_endpoint() -> Iterator[str]:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    yield f"127.0.0.1:{server._api._httpd.server_port}"
    server.stop()


@pytest.fixture(params=["s3fs", "pyarrow, by its URL", "pyarrow, by storage_options", "gcsfs"])
def store(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The directory /bucket/data with a dataset in two files, and a hidden one, for each of the ways to open it."""
    make = _gcs if request.param == "gcsfs" else _s3
    store = make(request.param, request.getfixturevalue(f"{make.__name__[1:]}_endpoint"), monkeypatch)
    write_dataset(tmp_path / "data", ROWS)
    store.files.create_dir("bucket")
    pafs.copy_files(str(tmp_path / "data"), "bucket/data", destination_filesystem=store.files)
    with store.files.open_output_stream("bucket/data/_SUCCESS") as empty:
        empty.write(b"")
    yield store
    store.files.delete_dir("bucket")


def _s3(way: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    arguments = {"access_key": "k", "secret_key": "s", "endpoint_override": endpoint, "scheme": "http"}
    arguments["region"] = "us-east-1"
    files = pafs.S3FileSystem(**arguments, allow_bucket_creation=True, allow_bucket_deletion=True)
    if way == "s3fs":
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://{endpoint}", "skip_instance_cache": True}
        return Store(files, lambda key: (f"s3://{key}", options))
    if way == "pyarrow, by its URL":
        query = f"?endpoint_override={endpoint}&scheme=http&region=us-east-1"
        return Store(files, lambda key: (f"s3://k:s@{key}{query}", None))
    without(monkeypatch, "s3", "s3fs")
    return Store(files, lambda key: (f"s3://{key}", arguments))


def _gcs(way: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    # Asked for when gcsfs is imported; else it asks for the kind of a bucket over gRPC, which the server does not speak.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs

    options = {"endpoint_url": f"http://{endpoint}", "token": "anon", "project": "p", "skip_instance_cache": True}
    files = pafs.PyFileSystem(pafs.FSSpecHandler(gcsfs.GCSFileSystem(**options)))
    return Store(files, lambda key: (f"gs://{key}", options))


def without(monkeypatch: pytest.MonkeyPatch, scheme: str, module: str) -> None:
    """Have a driver of fsspec not be installed."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, scheme, raising=False)


def test_row_groups_are_listed_and_every_row_is_read_once(store: Store) -> None:
    url, options = store.place("bucket/data")
    manifest = read_manifest(url, storage_options=options)
    assert [(group.path, group.rows) for group in manifest] == [
        ("part-0.parquet", 30),
        ("part-0.parquet", 1),
        ("part-1.parquet", 57),
        ("part-1.parquet", 12),
    ]
    assert sorted(ids(ParquetLoader(url, 16, storage_options=options))) == list(range(100))


def test_a_position_goes_on_in_a_larger_world(store: Store) -> None:
    url, options = store.place("bucket/data")
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


def test_an_object_that_is_replaced_or_deleted_is_named(store: Store) -> None:
    url, options = store.place("bucket/data")
    loader = ParquetLoader(url, 16, storage_options=options)
    with store.files.open_output_stream("bucket/data/part-1.parquet") as file:
        pq.write_table(make_table(np.arange(69) + 9), file)
    with pytest.raises(DataError, match=r"data/part-1\.parquet has changed since the dataset was listed"):
        ids(loader)
    store.files.delete_file("bucket/data/part-1.parquet")
    with pytest.raises(DataError, match=r"data/part-1\.parquet.*(gone|cannot be read)"):
        ids(loader)
    loader.close()


@pytest.mark.parametrize("way", ["s3fs", "pyarrow, by its URL", "a web server"])
def test_an_object_that_is_replaced_while_it_is_read_is_named(
    s3_endpoint: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _s3(way, s3_endpoint, monkeypatch)
    url, options = (f"http://{s3_endpoint}/bucket/x", None) if way == "a web server" else store.place("bucket/x")
    if way == "s3fs":
        options = {**(options or {}), "default_block_size": 100_000}  # else all is read at once

    def write(first: int) -> None:
        """Write a file whose length and footer do not depend on its values."""
        table = pa.table({"id": np.arange(first, first + 500_000)})
        with store.files.open_output_stream("bucket/x") as file:
            pq.write_table(
                table, file, row_group_size=20_000, compression="none", use_dictionary=False, write_statistics=False
            )

    store.files.create_dir("bucket")
    write(0)
    with contextlib.closing(ParquetLoader(url, 1000, shuffle=False, prefetch=1, storage_options=options)) as loader:
        batches = iter(loader)
        next(batches)
        write(1_000_000)
        with pytest.raises(DataError, match=r"bucket/x.*(has changed since the dataset was listed|FileExpired)"):
            ids(batches)
    store.files.delete_dir("bucket")


def test_a_key_or_bucket_that_is_not_there_is_named(store: Store) -> None:
    for key in ("bucket/nowhere", "no-such-bucket/data"):
        url, options = store.place(key)
        with pytest.raises(DataError, match=key):
            read_manifest(url, storage_options=options)


def test_checkpoints_are_written_to_a_bucket_and_a_missing_one_is_not_made(store: Store) -> None:
    url, options = store.place("bucket/checkpoints")
    assert [CheckpointDirectory(url, options).claim() for _ in range(2)] == [1, 2]
    url, options = store.place("no-such-bucket/checkpoints")
    with pytest.raises(OSError, match=r"(?i)bucket"):
        CheckpointDirectory(url, options).claim()
    assert store.files.get_file_info("no-such-bucket").type == pafs.FileType.NotFound


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
