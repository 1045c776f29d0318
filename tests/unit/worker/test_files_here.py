"""Files that a script has written: which are found, and which only some machines have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_elastic.worker import files_here
from spark_elastic.worker.files_here import describe_scattered, files_since


def test_files_written_since_the_start_are_found_where_the_script_works_and_where_it_was_told(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for path in (
        folder / "old.pt",
        folder / "new.pt",
        folder / "sub" / "deep.pt",
        folder / ".hidden",
        elsewhere / "its.pt",
    ):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    os.utime(folder / "old.pt", (1, 1))
    since = (folder / "new.pt").stat().st_mtime - 100
    named = ["--snapshot", str(elsewhere), "--epochs", "7"]
    assert files_since(str(folder), named, since) == sorted(["new.pt", "sub/deep.pt", str(elsewhere / "its.pt")])
    assert files_since(str(folder), named, since + 1e9) == []


def test_folders_of_very_many_files_are_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_here, "MOST_ENTRIES", 3)
    for number in range(3):
        (tmp_path / str(number)).touch()
    assert files_since(str(tmp_path), [], 0.0) == ["0", "1", "2"]
    (tmp_path / "3").touch()
    assert files_since(str(tmp_path), [], 0.0) is None


def test_files_that_only_some_have_are_named() -> None:
    assert describe_scattered({}) == ""
    assert describe_scattered({"east": ["a", "b"], "west": ["b", "a"]}) == ""
    told = describe_scattered({"east": ["a", "snapshot.pt"], "west": ["a"], "north": ["a"]})
    assert told.startswith("the script starts again, but snapshot.pt is on east only. If it goes on from there")
    assert describe_scattered({"east": ["a"], "west": None}) == ""
    assert "and 2 more" in describe_scattered({"east": list("abcde"), "west": []})
