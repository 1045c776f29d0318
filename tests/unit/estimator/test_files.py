"""Files that this process opens itself, where there is no Spark JVM beside it."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from spark_elastic.errors import DataError
from spark_elastic.estimator.files import ArrowFiles, as_mounted


@pytest.fixture(params=["plain", "file", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"plain": f"{tmp_path}/x", "file": f"file://{tmp_path}/x", "memory": f"memory://{secrets.token_hex(4)}/x"}[
        request.param
    ]


def test_what_is_written_is_listed_read_and_deleted(base: str) -> None:
    files = ArrowFiles(base)
    assert not files.exists(base)
    assert files.names(base) == []
    files.write(f"{base}/runs/a/run.json", b"{}")
    files.write(f"{base}/runs/b", b"other")
    assert files.exists(base)
    assert files.names(f"{base}/runs") == ["a", "b"]
    assert files.names(f"{base}/runs/a") == ["run.json"], "the file has its name only once it is whole"
    assert files.read(f"{base}/runs/b") == b"other"
    files.delete(f"{base}/runs/a")
    files.delete(f"{base}/runs/b")
    files.delete(f"{base}/runs/c")
    assert files.names(f"{base}/runs") == []
    with pytest.raises(OSError, match="run"):
        files.read(f"{base}/runs/a/run.json")


class Remembering(MemoryFileSystem):
    """Lists a folder once, as the drivers of object stores do, until it is told to look again."""

    protocol = "remembering"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listed: dict[str, Any] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("remembering://", "memory://")))

    def find(self, path: str, **options: Any) -> Any:
        if path not in self._listed:
            self._listed[path] = super().find(path, **options)
        return self._listed[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listed.clear()


def test_what_others_write_meanwhile_is_seen() -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    folder = secrets.token_hex(4)
    files = ArrowFiles(f"remembering://{folder}")
    for number, name in enumerate(("one", "two"), 1):
        MemoryFileSystem().pipe_file(f"/{folder}/{name}", b"")
        assert len(files.names(f"remembering://{folder}")) == number


def test_large_files_are_copied_both_ways(base: str, tmp_path: Path) -> None:
    content = os.urandom(9 * 2**20)
    (tmp_path / "here").write_bytes(content)
    files = ArrowFiles(base)
    files.upload(f"{tmp_path}/here", f"{base}/folder/there")
    files.download(f"{base}/folder/there", f"{tmp_path}/back")
    assert (tmp_path / "back").read_bytes() == content


def test_the_newest_of_a_folder_is_its_last_file(tmp_path: Path) -> None:
    files = ArrowFiles(f"file://{tmp_path}")
    files.write(f"file://{tmp_path}/data/part/one", b"")
    for place, age in (("data", 300), ("data/part", 200), ("data/part/one", 100)):
        os.utime(tmp_path / place, (time.time() - age,) * 2)
    assert files.newest(f"file://{tmp_path}/data") == pytest.approx(time.time() - 100, abs=50)


def test_databricks_files_are_those_of_the_mount() -> None:
    assert as_mounted("dbfs:/x/y") == "file:///dbfs/x/y"
    assert as_mounted("s3a://bucket/x") == "s3a://bucket/x"


def test_a_url_that_nothing_opens_is_named() -> None:
    with pytest.raises(DataError, match="strange://x cannot be opened"):
        ArrowFiles("strange://x")
