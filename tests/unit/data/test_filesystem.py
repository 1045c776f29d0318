"""The file system behind a URL: how it is opened and listed, and that no error tells its secrets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from data_worlds import write_dataset
from fsspec.implementations.local import LocalFileSystem
from loaded_rows import ids

from spark_elastic.data import ParquetLoader, read_manifest
from spark_elastic.data.filesystem import Location, list_below, list_files, locate
from spark_elastic.errors import DataError


def test_file_urls_may_be_quoted_and_may_have_one_slash(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "a dir #1", [5, 6])
    for url in (root.as_uri(), f"file://{root}", f"file:{root}", f"{root}/"):
        assert [group.rows for group in read_manifest(url)] == [5, 6]


def test_secrets_in_a_url_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"odd://…@bucket/x cannot be opened"):
        read_manifest("odd://key:secret@bucket/x")


def test_an_archive_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"none")
    with pytest.raises(DataError, match=r"zip://d::file://.*/x\.zip cannot be opened: File is not a zip file"):
        read_manifest(f"zip://d::file://{tmp_path}/x.zip")


def test_secrets_of_a_url_that_its_path_does_not_have_are_not_shown() -> None:
    location = locate("simplecache::memory://me:S3CRET@h/x")
    assert location.say(OSError("memory://me:S3CRET@h/x")) == "OSError: memory://…@h/x"


@pytest.mark.parametrize("refused", [False, True])
def test_secrets_that_a_driver_keeps_in_its_paths_are_not_shown(refused: bool) -> None:
    def refuse(selector: Any) -> Any:
        raise OSError(f"{selector} has no such bucket")

    def miss(selector: Any) -> Any:
        return pafs.FileInfo(selector, pafs.FileType.NotFound)

    files: Any = SimpleNamespace(get_file_info=refuse if refused else miss)
    for root in ("AK:S3CRET@bucket/x", "ftp://AK:S3CRET@bucket/x"):
        with pytest.raises(DataError, match="…@bucket/x") as raised:
            list_files(Location(files, root, False))
        assert "S3CRET" not in str(raised.value)


class Refusing(LocalFileSystem):
    """Stands for drivers of fsspec with its own way of listing, which leaves out folders that it cannot list."""

    protocol = "refusing-day"

    def ls(self, path: str, *others: Any, **more: Any) -> Any:
        if path.endswith("day=1"):
            raise PermissionError(path)
        return super().ls(path, *others, **more)


def test_a_dataset_with_a_folder_that_cannot_be_listed_is_not_read_without_it(tmp_path: Path) -> None:
    fsspec.register_implementation("refusing-day", Refusing, clobber=True)
    for day in range(2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"x": [1.0]}), tmp_path / f"day={day}" / "part.parquet")
    with pytest.raises(DataError, match=r"cannot be listed: PermissionError: .*day=1"):
        read_manifest(f"refusing-day://{tmp_path}")


class Marking(LocalFileSystem):
    """Lists in each folder the empty object that stands for it, as stores do where another tool has made folders."""

    protocol = "marking"

    def ls(self, path: str, *others: Any, **more: Any) -> Any:
        return [{"name": f"{path}/", "size": 0, "type": "file"}, *super().ls(path, *others, **more)]


def test_an_object_that_stands_for_its_folder_is_no_file_of_a_dataset(tmp_path: Path) -> None:
    fsspec.register_implementation("marking", Marking, clobber=True)
    write_dataset(tmp_path / "day=1", [3, 4])
    marked = Location(pafs.PyFileSystem(pafs.FSSpecHandler(Marking())), str(tmp_path), False)
    assert [path for path, _ in list_files(marked)] == [path for path, _ in list_files(locate(tmp_path))]


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_dataset(tmp_path / "data", [7])
    assert sorted(ids(ParquetLoader("~/data", 2))) == list(range(7))


def test_a_cache_in_front_of_an_object_store_makes_no_folders_there_and_other_file_systems_do(tmp_path: Path) -> None:
    class NoFolders(fsspec.AbstractFileSystem):
        def mkdir(self, path: str, *others: Any, **more: Any) -> None:
            raise AssertionError(f"{path} would be made")

    class Bucket(NoFolders):
        protocol = ("s3", "s3a")

    class Cache(NoFolders):
        protocol, fs = "blockcache", Bucket()

    for store in (Bucket(), Cache()):
        location = Location(pafs.PyFileSystem(pafs.FSSpecHandler(store)), "bucket/x", False)
        location.make_folder_of("bucket/x/part")
    here = locate(tmp_path / "x")
    here.make_folder_of(here.join("a/b/part"))
    assert (tmp_path / "x/a/b").is_dir()


def test_a_folder_is_listed_as_it_is_now_a_missing_one_is_empty_and_a_file_is_none() -> None:
    location = locate("memory://listed/x")
    assert list_below(location.filesystem, location.root) == []
    files = fsspec.filesystem("memory")
    for name in ("one", "deep/two"):
        files.pipe_file(f"/listed/x/{name}", b"12")
    found = {info.path.rpartition("x/")[2]: info.size for info in list_below(location.filesystem, location.root)}
    assert found == {"one": 2, "deep": None}
    everything = list_below(location.filesystem, location.root, recursive=True)
    assert sorted(info.path.rpartition("x/")[2] for info in everything) == ["deep", "deep/two", "one"]
    with pytest.raises(NotADirectoryError):
        list_below(location.filesystem, f"{location.root}/one")
    files.rm("/listed", recursive=True)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("", None, "the URL of a dataset must not be empty"),
        ("/x", ["key"], r"storage_options must be a dict of options, not \['key'\]"),
        (
            "s3://AK:S3CRET@b/x?region=r",
            {"region": "r"},
            r"^s3://…@b/x\?region=r: give a query or storage_options, not both",
        ),
    ],
)
def test_what_does_not_name_a_place_is_refused(url: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        locate(url, options)
