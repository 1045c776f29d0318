"""The folder of a fit without a store is gone after it, and after the next one if the first was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spark_elastic.estimator.temporary_store import PREFIX, temporary_store

FIT = """
import tempfile, sys, time
from spark_elastic.estimator.temporary_store import temporary_store
with temporary_store() as store:
    print(store.url.removeprefix("file://"), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_removed_after_the_fit_and_after_an_error(folder: Path) -> None:
    with temporary_store() as store:
        (folder / Path(store.url).name / "data").mkdir()
    with pytest.raises(KeyError), temporary_store():
        raise KeyError
    assert list(folder.iterdir()) == []


def test_folders_of_killed_fits_are_removed_by_the_next_and_those_of_running_ones_are_not(folder: Path) -> None:
    other = folder / f"{PREFIX}of-something-else"
    other.mkdir()
    with subprocess.Popen([sys.executable, "-c", FIT], stdout=subprocess.PIPE, text=True) as fit:
        assert fit.stdout is not None
        theirs = Path(fit.stdout.readline().strip())
        (theirs / "data").mkdir()
        with temporary_store():
            assert (theirs / "data").exists()
        fit.send_signal(signal.SIGKILL)
        fit.wait()
        assert (theirs / "data").exists()
        with temporary_store() as store:
            mine = Path(store.url.removeprefix("file://"))
            assert sorted(folder.iterdir()) == sorted([other, mine])


def test_a_folder_that_spark_made_again_after_an_interrupt_is_removed_once_it_is_old(folder: Path) -> None:
    old, new = folder / f"{PREFIX}old", folder / f"{PREFIX}new"
    for path in (old, new):
        (path / "data").mkdir(parents=True)
    os.utime(old, (0, 0))
    with temporary_store():
        assert (new / "data").exists()
        assert not old.exists()
