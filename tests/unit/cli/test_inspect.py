"""inspect: what a dataset is made of, and warnings about what slows training down."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.cli import inspect, main
from spark_elastic.cli.inspect import size, warnings
from spark_elastic.data import read_manifest


def write(folder: Path, *groups: int) -> Path:
    """A dataset of one file, whose row groups have so many rows."""
    folder.mkdir()
    schema = pa.schema({"x": pa.int64()})
    with pq.ParquetWriter(folder / "a.parquet", schema) as writer:
        for rows in groups:
            writer.write_table(pa.table({"x": range(rows)}, schema))
    return folder


def test_the_figures_of_a_dataset_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(write(tmp_path / "d", 10, 20, 30, 20)), "--workers", "2"]) == 0
    text = capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "d" / "a.parquet"), "--workers", "2"]) == 0
    assert "80 rows" in capsys.readouterr().out
    assert "1 files, 4 row groups, 80 rows" in text
    assert "rows in a group: 10 to 30, median 20" in text
    assert "x: int64" in text
    assert "!" not in text


def test_names_with_control_codes_leave_the_terminal_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "d\x1b[31m" / "part\x1b[31m=1"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x\x1b]0;title\x07y": [1, 2]}), folder / "a.parquet")
    assert main(["inspect", str(folder.parent)]) == 0
    text = capsys.readouterr().out
    assert "  xy: int64\n  part: " in text
    assert not {"\x1b", "\x07"} & set(text)
    assert main(["inspect", str(folder / "none")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_all_of_it_can_be_had_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(write(tmp_path / "d", 10, 20)), "--json", "--workers", "1"])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["row_groups"], facts["columns"], facts["petastorm"]) == (30, 2, {"x": "int64"}, False)
    assert [group["rows"] for group in facts["row_group_list"]] == [10, 20]


@pytest.mark.parametrize(
    ("groups", "workers", "warning"),
    [
        ([100], 4, "1 row groups for 4 workers"),
        ([10, 10, 10, 200], 4, "a.parquet, row group 3, holds 87% of all rows"),
        ([10, 10], 4, "2 row groups for 4 workers"),
        ([5, 0, 5], 2, "1 row groups are empty"),
        ([1] * 301, 3, "301 row groups of"),
        ([0], 1, "there are no rows"),
    ],
)
def test_what_slows_training_down_is_warned_of(groups: list[int], workers: int, warning: str, tmp_path: Path) -> None:
    (found,) = warnings(read_manifest(write(tmp_path / "d", *groups)), workers)
    assert warning in found


def test_one_huge_row_group_is_warned_of_where_there_are_few_others(tmp_path: Path) -> None:
    few, huge = warnings(read_manifest(write(tmp_path / "d", 10, 10, 500)), 8)
    assert "3 row groups for 8 workers" in few
    assert "row group 2, holds 96% of all rows" in huge


def test_a_row_group_that_fills_the_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "HUGE_BYTES", 4000)
    (found,) = warnings(read_manifest(write(tmp_path / "d", 300, 1000, 300)), 2)
    assert "the largest" in found
    assert "row group 1" in found


@pytest.mark.parametrize("workers", ["0", "-3"])
def test_a_number_of_workers_that_is_none_is_an_error(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(write(tmp_path / "d", 10)), "--workers", workers]) == 2
    assert f"--workers must be a whole number from 1 on, not {workers}" in capsys.readouterr().err


def test_a_place_without_a_dataset_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no Parquet files" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["attempt-000001-0123456789abcdef", "000001-000001-000000001/tensors.safetensors"])
def test_what_a_job_leaves_that_dies_ahead_of_its_first_checkpoint_is_no_damaged_dataset(
    left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_bytes(b"begun")
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"spark-elastic: {tmp_path} holds no complete checkpoint\n"


@pytest.mark.parametrize(("count", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (5 * 2**40, "5,120.0 GiB")])
def test_bytes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_a_folder_around_one_of_checkpoints_is_not_said_to_hold_a_damaged_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saved" / "000001-000001-000000001").mkdir(parents=True)
    (tmp_path / "saved" / "000001-000001-000000001" / "manifest.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"{tmp_path} is no checkpoint directory, nor a dataset that can be read: " in capsys.readouterr().err
