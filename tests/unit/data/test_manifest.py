from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import make_table, write_dataset
from fsspec.implementations.local import LocalFileSystem

from spark_elastic.data import Manifest, ParquetLoader, read_manifest
from spark_elastic.data.filesystem import locate
from spark_elastic.data.source import Source
from spark_elastic.errors import DataError


def test_row_groups_are_listed_in_path_order_with_rows_and_bytes(tmp_path: Path) -> None:
    manifest = read_manifest(write_dataset(tmp_path, [30, 1, 0, 57], files=2))
    assert [(g.path, g.ordinal, g.rows) for g in manifest] == [
        ("part-0.parquet", 0, 30),
        ("part-0.parquet", 1, 1),
        ("part-1.parquet", 0, 0),
        ("part-1.parquet", 1, 57),
    ] or [(g.path, g.ordinal, g.rows) for g in manifest] == [
        ("part-0.parquet", 0, 30),
        ("part-0.parquet", 1, 1),
        ("part-1.parquet", 0, 57),
    ]
    assert all(g.compressed_bytes > 0 and g.uncompressed_bytes > 0 for g in manifest if g.rows)
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest[0].rows = 3  # type: ignore[misc]


def test_hidden_and_empty_files_are_skipped(tmp_path: Path) -> None:
    write_dataset(tmp_path, [5])
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "_metadata").write_text("no parquet")
    (tmp_path / ".part.crc").write_text("crc")
    (tmp_path / "empty.parquet").write_text("")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "x.parquet").write_text("no parquet")
    assert [group.rows for group in read_manifest(tmp_path)] == [5]


def test_urls_of_any_file_system_are_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [5, 6])
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "d"), "/held", recursive=True)
    expected = [5, 6]
    for url in (str(tmp_path / "d"), f"file://{tmp_path}/d", "memory://held"):
        assert [group.rows for group in read_manifest(url)] == expected
        assert sorted(row for b in ParquetLoader(url, 4) for row in b["id"].tolist()) == list(range(11))


class Keeping(fsspec.AbstractFileSystem):
    """Local files under paths that keep all of a URL, which errors repeat, as with the drivers of FTP and HTTP."""

    protocol, host = "keeping", "keeping://AK:S3CRET@h"
    files = LocalFileSystem()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path

    def info(self, path: str, **more: Any) -> Any:
        return {**self.files.info(path.removeprefix(self.host)), "name": path}

    def ls(self, path: str, detail: bool = False, **more: Any) -> Any:
        found = self.files.ls(path.removeprefix(self.host), detail=True)
        return [{**entry, "name": self.host + entry["name"]} for entry in found]

    def open(self, path: str, *others: Any, **more: Any) -> Any:
        if "refused" in path:
            raise PermissionError(f"{path} is refused")
        return self.files.open(path.removeprefix(self.host), *others)


def test_files_below_a_root_with_secrets_are_named_without_them(tmp_path: Path) -> None:
    fsspec.register_implementation("keeping", Keeping, clobber=True)
    write_dataset(tmp_path, [3, 4])
    url = Keeping.host + str(tmp_path)
    assert list(ParquetLoader(url, batch_size=7))

    def complaint(of: Callable[[], object]) -> str:
        with pytest.raises(DataError, match=r"keeping://…@h/") as raised:
            of()
        assert "S3CRET" not in str(raised.value)
        return str(raised.value)

    assert "found under two" in complaint(lambda: read_manifest([url, url]))
    (tmp_path / "_common_metadata").write_bytes(b"cut off")
    assert "_common_metadata cannot be read as Parquet" in complaint(lambda: read_manifest(url))
    (tmp_path / "_common_metadata").unlink()
    manifest = read_manifest(url)
    min(tmp_path.glob("*.parquet")).rename(tmp_path / "refused.parquet")
    assert "refused.parquet cannot be read as Parquet" in complaint(lambda: read_manifest(url))
    with Source(manifest, [locate(url)]) as source:
        assert "is gone" in complaint(lambda: source.check(0))
        write_dataset(tmp_path, [5, 4])
        assert "has changed since" in complaint(lambda: source.check(0))


class Disconnected(Exception):
    """Stands for errors of a driver that are no OSErrors, such as aiohttp's."""


class Dropping(LocalFileSystem):
    """Drops the connection when a file's bytes are asked for."""

    protocol, dropped = "dropping", "none of the files"

    def open(self, path: str, *others: Any, **more: Any) -> Any:
        if path.endswith(self.dropped):
            raise Disconnected("Server disconnected")
        return super().open(path, *others, **more)


@pytest.mark.parametrize("name", ["part-1.parquet", "_common_metadata"])
def test_a_connection_that_is_dropped_while_footers_are_read_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fsspec.register_implementation("dropping", Dropping, clobber=True)
    write_dataset(tmp_path, [3, 4])
    (tmp_path / "_common_metadata").write_bytes((tmp_path / "part-0.parquet").read_bytes())
    assert len(read_manifest(f"dropping://{tmp_path}")) == 2
    monkeypatch.setattr(Dropping, "dropped", name)
    with pytest.raises(DataError, match=rf"{name} cannot be read as Parquet: Disconnected: Server disconnected"):
        read_manifest(f"dropping://{tmp_path}")


def test_the_fingerprint_is_of_the_data_and_not_of_its_place(tmp_path: Path) -> None:
    first = read_manifest(write_dataset(tmp_path / "a", [5, 6]))
    again = read_manifest(write_dataset(tmp_path / "b", [5, 6]))
    other = read_manifest(write_dataset(tmp_path / "c", [6, 5]))
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_manifest_survives_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "y=1").mkdir()
    write_dataset(tmp_path / "y=1", [5, 6, 7])
    manifest = read_manifest(tmp_path)
    assert Manifest.decode(manifest.encode()) == manifest
    assert Manifest.decode(manifest.encode()).fingerprint == manifest.fingerprint
    assert Manifest.decode(manifest.encode()).schema == manifest.schema


@pytest.mark.parametrize("content", [b"x", b"PAR1PAR1", b"no parquet at all, but long enough", b"\xff" * 100 + b"PAR1"])
def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"odd\.parquet cannot be read as Parquet"):
        read_manifest(tmp_path)


def test_nothing_to_read_is_an_error_that_names_the_url(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no Parquet files"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="odd://bucket/x cannot be opened"):
        read_manifest("odd://bucket/x")
    with pytest.raises(ValueError, match="must not be empty"):
        read_manifest("")
    with pytest.raises(ValueError, match="storage_options must be a dict of options, not 5"):
        read_manifest(tmp_path, storage_options=5)  # type: ignore[arg-type]


def test_footers_longer_than_the_first_read_are_read(tmp_path: Path) -> None:
    table = pa.table({f"column{i}": np.arange(40) for i in range(300)})
    pq.write_table(table, tmp_path / "wide.parquet", row_group_size=2)
    assert [group.rows for group in read_manifest(tmp_path)] == [2] * 20


def test_lists_of_one_length_are_known_from_the_footers(tmp_path: Path) -> None:
    table = make_table(np.arange(10)).append_column("v", pa.array([[1] * (i % 3) for i in range(10)]))
    pq.write_table(table, tmp_path / "t.parquet")
    assert dict(read_manifest(tmp_path).list_lengths) == {"x": 2, "v": None}


def test_lists_are_found_in_files_whose_columns_come_in_another_order(tmp_path: Path) -> None:
    table = pa.table({"x": [[1, 2], [3, 4], [5, 6]], "t": [1, 2, 3], "y": [[1], [2], [3]]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.select(["y", "t", "x"]), tmp_path / "b.parquet")
    assert dict(read_manifest(tmp_path).list_lengths) == {"x": 2, "y": 1}


def test_lists_are_told_apart_whose_names_have_dots(tmp_path: Path) -> None:
    table = pa.table({"a": [[1], [2, 3]], "a.b": [[1, 2], [3, 4]], "s": [{"b": [1]}, {"b": [2]}], "c": [[0.5], [1.5]]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert dict(read_manifest(tmp_path).list_lengths) == {"a": None, "a.b": 2, "c": 1}


def test_folders_of_different_partitions_are_an_error(tmp_path: Path) -> None:
    write_dataset(tmp_path / "year=2024" / "month=1", [3])
    write_dataset(tmp_path / "year=2025", [3])
    with pytest.raises(DataError, match=r"has the Hive partitions \['year'\], .* has \['month', 'year'\]"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-7"], "int64"),
        (["1", "2.5"], "double"),
        (["1_0", "2"], "string"),
        (["\u0663"], "string"),
        (["1" + "0" * 20], "double"),
        (["12345678901234567890", "12345678901234567891"], "string"),
        (["2.5", str(2**53 + 1)], "string"),
        (["0x10", "16"], "string"),
        (["0X1f"], "string"),
        (["nan(1)", "nan(2)"], "string"),
        (["0.1234567890123456781", "0.1234567890123456782"], "string"),
        (["1e-400", "0"], "string"),
        (["007", "7", "-0"], "int64"),
        (["1e3", "1.", ".5", "+5", "NaN", "-inf"], "double"),
    ],
)
def test_partitions_have_the_types_that_arrow_makes_of_their_values(
    tmp_path: Path, values: list[str], kind: str
) -> None:
    for value in values:
        write_dataset(tmp_path / f"p={value}", [3])
    manifest = read_manifest(tmp_path)
    assert str(manifest.partition_types["p"]) == kind
    assert sum(len(batch["id"]) for batch in ParquetLoader(tmp_path, 4, columns=["id"])) == 3 * len(values)
