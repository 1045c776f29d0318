"""A list of URLs is one dataset: its rows count once, its files are those listed, and what does not fit together is refused."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import World, make_table, write_dataset
from loaded_rows import ids

from spark_elastic.data import Manifest, ParquetLoader, read_manifest
from spark_elastic.errors import DataError


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """A folder, a file, and a folder of another file system. Their rows are numbered 0 to 59, and files have the same names."""
    write_dataset(tmp_path / "a", [10, 12])
    for number in (1, 2):
        (tmp_path / f"{number}").mkdir()
    pq.write_table(make_table(np.arange(22, 40)), tmp_path / "1" / "part-0.parquet", row_group_size=5)
    pq.write_table(make_table(np.arange(40, 60)), tmp_path / "2" / "part-0.parquet", row_group_size=5)
    fsspec.filesystem("memory").put(str(tmp_path / "2"), f"/{tmp_path.name}", recursive=True)
    return [str(tmp_path / "a"), f"file://{tmp_path}/1/part-0.parquet", f"memory://{tmp_path.name}"]


def test_unshuffled_rows_come_in_the_order_of_the_list(urls: list[str]) -> None:
    assert ids(ParquetLoader(urls, 8, shuffle=False)) == list(range(60))
    assert sorted(ids(ParquetLoader(urls, 8))) == list(range(60))
    backwards = ids(ParquetLoader(urls[::-1], 8, shuffle=False))
    assert backwards == [*range(40, 60), *range(22, 40), *range(22)]
    assert sorted(ids(ParquetLoader(urls, 8, filters=[("id", ">", 15), ("id", "<", 45)]))) == list(range(16, 45))


@pytest.mark.parametrize("scheme", ["", "file://", "local://", "simplecache::file://"])
def test_a_url_may_be_that_of_a_file_on_any_file_system(urls: list[str], scheme: str) -> None:
    assert ids(ParquetLoader(scheme + urls[1].removeprefix("file://"), 8, shuffle=False)) == list(range(22, 40))


def test_row_ids_name_row_groups_of_all_urls_together(urls: list[str]) -> None:
    loader = ParquetLoader(urls, 8, with_row_ids=True)
    starts = np.cumsum([0, *[group.rows for group in loader.manifest]])
    seen = [(int(g), int(r)) for b in loader for g, r in zip(b["_row_group"], b["_row"], strict=True)]
    assert len(set(seen)) == 60
    for batch in loader:
        assert (starts[batch["_row_group"]] + batch["_row"].numpy()).tolist() == batch["id"].tolist()
    assert [group.root for group in loader.manifest] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_rows_count_once_through_resets(urls: list[str]) -> None:
    world = World(lambda: ParquetLoader(urls, global_batch_size=8), 3)
    world.same_steps = True
    world.train_through_a_loss()
    assert world.counted == collections.Counter((0, row) for row in range(60))


def test_a_manifest_of_several_urls_survives_its_bytes_and_tells_its_order(urls: list[str], tmp_path: Path) -> None:
    manifest = read_manifest(urls)
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.fingerprint != read_manifest(urls[::-1]).fingerprint
    assert read_manifest(urls[:1]) == read_manifest(urls[0])
    moved = write_dataset(tmp_path / "elsewhere", [10, 12])
    assert read_manifest([moved, *urls[1:]]).fingerprint == manifest.fingerprint


def test_a_position_belongs_to_the_same_list(urls: list[str]) -> None:
    loader = ParquetLoader(urls, 8)
    iterator = iter(loader)
    first = [int(row) for _ in range(2) for row in next(iterator)["id"]]
    state = loader.state_dict()
    loader.close()
    again = ParquetLoader(urls, 8)
    again.load_state_dict(state)
    assert sorted(first + ids(again)) == list(range(60))
    with pytest.raises(DataError, match="the dataset has changed"):
        ParquetLoader(urls[:2], 8).load_state_dict(state)
    with pytest.raises(DataError, match="the dataset has changed"):
        ParquetLoader(urls[::-1], 8).load_state_dict(state)


def test_a_file_that_was_replaced_is_named(urls: list[str], tmp_path: Path) -> None:
    loader = ParquetLoader(urls, 8, shuffle=False)
    changed = tmp_path / "1" / "part-0.parquet"
    pq.write_table(make_table(np.arange(100, 119)), changed)
    with pytest.raises(DataError, match=f"{changed} has changed since"):
        ids(loader)


def test_an_error_names_the_url_of_a_row_group(urls: list[str]) -> None:
    def refuse(table: pa.Table) -> pa.Table:
        if table["id"][0].as_py() >= 40:
            raise ZeroDivisionError
        return table

    loader = ParquetLoader(urls, 8, shuffle=False, transform=refuse)
    with pytest.raises(DataError, match=re.escape(f"{urls[2]}/part-0.parquet, row group 0: transform raised ZeroDiv")):
        list(loader)


def test_another_schema_is_an_error_that_names_the_file(urls: list[str], tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    pq.write_table(pa.table({"id": [1.0]}), odd / "p.parquet")
    with pytest.raises(
        DataError, match=f"{odd}/p.parquet has another schema than {urls[0]}/part-0.parquet: column 'id'"
    ):
        ParquetLoader([*urls, odd], 8)
    (tmp_path / "hive" / "year=1").mkdir(parents=True)
    pq.write_table(make_table(np.arange(3)), tmp_path / "hive" / "year=1" / "p.parquet")
    with pytest.raises(
        DataError, match=r"year=1/p.parquet has the Hive partitions \['year'\], .*part-0.parquet has \[\]"
    ):
        ParquetLoader([*urls, tmp_path / "hive"], 8)


def test_a_list_that_is_no_dataset_is_refused(urls: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="url must be a URL or a list of URLs, not an empty list"):
        ParquetLoader([], 8)
    with pytest.raises(DataError, match=r"part-0.parquet is found under two of the URLs: its rows would count twice"):
        ParquetLoader([urls[0], tmp_path / "a" / "part-0.parquet"], 8)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match=r"part-0.parquet is found under two of the URLs: its rows would count twice"):
        ParquetLoader([urls[0], tmp_path / "link"], 8)
    with pytest.raises(DataError, match=r"part-0.parquet is found under two of the URLs: its rows would count twice"):
        ParquetLoader([urls[0], f"local://{tmp_path}/link"], 8)
    assert (
        ParquetLoader([tmp_path / "link"], 8).rows_total
        == ParquetLoader(f"local://{tmp_path}/link", 8).rows_total
        == 22
    )
    with pytest.raises(DataError, match="nowhere does not exist"):
        ParquetLoader([*urls, tmp_path / "nowhere"], 8)
    (tmp_path / "link" / "deep").mkdir()
    (tmp_path / "link" / "deep" / "again").symlink_to("..")
    with pytest.raises(DataError, match=r"deep/again is a link that leads to a folder that it is in"):
        ParquetLoader(tmp_path / "a", 8)
    (tmp_path / "link" / "deep" / "again").unlink()
    (tmp_path / "link" / "deep" / "lost.parquet").symlink_to("gone.parquet")
    with pytest.raises(
        DataError, match=r"deep/lost.parquet is a link to gone.parquet, which does not exist: remove it"
    ):
        ParquetLoader(tmp_path / "a", 8)
    (tmp_path / "link" / "deep" / "lost.parquet").rename(tmp_path / "link" / "deep" / "_lost")
    assert ParquetLoader(tmp_path / "link", 8).rows_total == 22
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: no Parquet files"):
        ParquetLoader([*urls, tmp_path / "empty"], 8)


def test_hive_partitions_of_all_urls_are_columns(tmp_path: Path) -> None:
    for place, year in (("a", "2023"), ("b", "x")):
        (tmp_path / place / f"year={year}").mkdir(parents=True)
        pq.write_table(make_table(np.arange(3)), tmp_path / place / f"year={year}" / "p.parquet")
    loader = ParquetLoader([tmp_path / "a", tmp_path / "b"], 8, filters=[("year", "=", "x")])
    assert loader.rows_total == 3, "the partitions are of one type, here strings"


@pytest.mark.parametrize(
    "container", [set, frozenset, iter, lambda urls: dict.fromkeys(urls, 1), lambda urls: [*urls, 7]]
)
def test_urls_that_have_no_order_or_are_none_are_refused(urls: list[str], container: Any) -> None:
    assert ParquetLoader(tuple(urls), 8).rows_total == 60
    with pytest.raises(ValueError, match="url must be a URL or path, or a list or tuple of these, not "):
        ParquetLoader(container(urls), 8)
