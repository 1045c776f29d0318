from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data import read_manifest
from spark_elastic.estimator.identity import identity_of_files


def write(path: Path, labels: list[float], nanoseconds: int) -> None:
    table = pa.table({"x": [0.0, 1.0, 2.0, 3.0], "label": labels})
    pq.write_table(table, path / "part.parquet", compression="none", use_dictionary=False)
    os.utime(path / "part.parquet", ns=(nanoseconds, nanoseconds))


def test_a_dataset_whose_labels_have_changed_places_has_another_identity(tmp_path: Path) -> None:
    write(tmp_path, [0.0, 1.0, 2.0, 3.0], 10**18)
    url = str(tmp_path)
    footers, identity = read_manifest(url).fingerprint, identity_of_files(url, None)
    assert identity_of_files(url, None) == identity
    write(tmp_path, [3.0, 2.0, 1.0, 0.0], 10**18 + 1)
    assert read_manifest(url).fingerprint == footers
    assert identity_of_files(url, None) != identity


def test_a_file_system_may_know_no_times() -> None:
    files = fsspec.filesystem("memory")
    with files.open("/identity/part.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [1.0]}), file)
    try:
        assert identity_of_files("memory://identity", None) == identity_of_files("memory://identity", {})
    finally:
        files.rm("/identity", recursive=True)
