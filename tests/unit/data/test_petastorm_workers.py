"""Petastorm itself, which not every environment has; test_petastorm_engine.py has the engine on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data import ParquetLoader


def test_asking_for_the_petastorm_engine_without_it_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    import importlib.metadata

    version = importlib.metadata.version
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")

    def gone(name: str) -> str:
        if name == "petastorm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", gone)
    for name in ("petastorm_engine", "petastorm_workers"):  # what an import has found out is kept
        monkeypatch.delitem(sys.modules, f"spark_elastic.data.{name}", raising=False)
    with pytest.raises(ImportError, match=r"needs petastorm 0\.12\.1: pip install 'spark-elastic\[petastorm\]'"):
        ParquetLoader(tmp_path, 1, engine="petastorm")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.13.1" if name == "petastorm" else version(name))
    with pytest.raises(ImportError, match=r"refuses petastorm 0\.13\.1: .* silently loses rows"):
        ParquetLoader(tmp_path, 1, engine="petastorm")
