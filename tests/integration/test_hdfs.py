"""Data, checkpoints and an estimator's store in a real HDFS, on real executors.

Needs an HDFS and a Hadoop client, which ``pip`` does not bring: ``SPARK_ELASTIC_TEST_HDFS=hdfs://host:port/folder`` names a
folder that may be written, and JAVA_HOME, ARROW_LIBHDFS_DIR and CLASSPATH are set as docs/data.md says.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch
import training
from data_jobs import ROWS
from estimators import make
from jobs import check
from networks import RowCounter, count_row

from spark_elastic import CheckpointError, load_checkpoint
from spark_elastic.data import ParquetLoader, read_manifest
from spark_elastic.data.filesystem import Location, locate
from spark_elastic.errors import DataError
from spark_elastic.estimator import Store, TorchModel
from spark_elastic.testing import inject, kill, kill_executor

HDFS = os.environ.get("SPARK_ELASTIC_TEST_HDFS")
pytestmark = pytest.mark.skipif(
    HDFS is None, reason="no package installs an HDFS; SPARK_ELASTIC_TEST_HDFS=hdfs://host:port/folder names one"
)


@pytest.fixture(scope="module")
def root() -> str:
    """Where all is written. From here on this process has a JVM, which keeps its jars open."""
    assert HDFS is not None
    locate(HDFS)
    return HDFS


@pytest.fixture
def folder(root: str) -> Iterator[str]:
    """The URL of an empty folder."""
    url = f"{root}/{secrets.token_hex(8)}"
    place = locate(url)
    place.filesystem.create_dir(place.root)
    yield url
    place.filesystem.delete_dir(place.root)


@pytest.fixture
def rows(folder: str, dataset: str) -> Location:
    """The dataset of the tests of jobs, below the folder."""
    place = locate(f"{folder}/rows")
    pafs.copy_files(dataset, place.root, destination_filesystem=place.filesystem)
    return place


def test_rows_count_once_through_losses_and_go_on_from_a_checkpoint(
    run_on_spark: Any, folder: str, rows: Location
) -> None:
    durable = {"min_np": 2, "max_np": 2, "checkpoint": f"{folder}/saved", "checkpoint_interval": 0}
    faults = [kill(rank=0, step=5), kill_executor(rank=1, step=20)]
    batch = {"global_batch_size": 64}
    result = run_on_spark(training.count_rows, f"{folder}/rows", ROWS, 2, batch, faults=faults, **durable)
    assert len(result.of("fault_injected")) == 2
    assert result.of("checkpoint_written")
    again = run_on_spark(training.count_rows, f"{folder}/rows", ROWS, 3, batch, **durable)
    assert again.of("checkpoint_restored")
    for epochs, each in ((2, result), (3, again)):
        for entry in each.results:
            assert entry["seen"] == pytest.approx([epochs] * ROWS)


def test_a_checkpoint_is_read_by_a_driver_and_a_damaged_one_passed_over(run_on_spark: Any, folder: str) -> None:
    durable = {"min_np": 1, "max_np": 1, "checkpoint": f"{folder}/saved", "checkpoint_interval": 0}
    check(run_on_spark(training.count_steps, 20, 0.02, **durable), 20)
    assert load_checkpoint(f"{folder}/saved")["step"] == 20
    place = locate(f"{folder}/saved")
    files = place.filesystem.get_file_info(pafs.FileSelector(place.root, recursive=True))
    newest = max(file.path for file in files if file.path.endswith("tensors.safetensors"))
    with place.filesystem.open_output_stream(newest) as file:
        file.write(b"?")
    again = run_on_spark(training.count_steps, 30, 0.02, **durable)
    check(again, 30)
    assert again.of("checkpoint_damaged")


def test_an_estimator_keeps_data_runs_and_models_there(spark: Any, folder: str) -> None:
    store = Store.create(f"{folder}/store")
    estimator = make(
        model=RowCounter(600), featureCols=["id"], loss=None, labelCols=None, learningRate=1.0, optimizer=torch.optim.SGD,
        trainStep=count_row, epochs=2, globalBatchSize=50, store=store, runId="counted",
    )  # fmt: skip
    with inject(kill(rank=0, step=6)):
        model = estimator.fit(spark.range(600))
    assert model.model.seen.tolist() == pytest.approx([2.0] * 600)
    longer = estimator.copy({estimator.epochs: 3}).fit(spark.range(600))
    assert longer.model.seen.tolist() == pytest.approx([3.0] * 600)
    assert len(store.files.names(store.data_url)) == 1, "the data were written once"
    assert store.runs() == ["counted"]
    model.save(f"{folder}/model")
    assert TorchModel.load(f"{folder}/model").model.seen.tolist() == model.model.seen.tolist()
    store.delete("counted")
    store.delete_data()
    assert (store.runs(), store.files.names(store.data_url)) == ([], [])


def test_a_file_that_is_replaced_or_deleted_is_named(folder: str, rows: Location) -> None:
    loader = ParquetLoader(f"{folder}/rows", 16)
    with rows.filesystem.open_output_stream(f"{rows.root}/part-1.parquet") as file:
        pq.write_table(pa.table({"id": range(69)}), file)
    with pytest.raises(DataError, match=r"rows/part-1\.parquet has changed since the dataset was listed"):
        list(loader)
    rows.filesystem.delete_file(f"{rows.root}/part-1.parquet")
    with pytest.raises(DataError, match=r"rows/part-1\.parquet.*(gone|cannot be read)"):
        list(loader)
    loader.close()


def test_what_is_not_there_is_named(folder: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/nowhere does not exist"):
        read_manifest(f"{folder}/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as free:
        silent = f"hdfs://127.0.0.1:{free.getsockname()[1]}/data"
    with pytest.raises(DataError, match=rf"{silent} cannot be opened: no name node answers"):
        read_manifest(silent)
    with pytest.raises(CheckpointError, match="no name node answers"):
        load_checkpoint(silent)
