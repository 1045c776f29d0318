"""Executors whose Python or torch is not the driver's, or not that of other executors."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from submitted import Submitted

pytestmark = pytest.mark.long

Submit = Callable[..., Submitted]


def other_pythons() -> Iterator[tuple[str, str]]:
    """Yield interpreters of other minor versions that Spark knows, and which these are."""
    for minor in set(range(10, 15)) - {sys.version_info.minor}:
        named = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        for python in filter(None, map(str, named)):
            # What is found may be a stub that only says how to install it.
            said = subprocess.run([python, "--version"], capture_output=True, text=True).stdout
            if said.startswith(f"Python 3.{minor}."):
                yield python, f"3.{minor}"


def test_another_minor_version_of_python_is_an_error_that_names_both(submit: Submit) -> None:
    found = next(other_pythons(), None)
    if found is None:
        pytest.skip("takes another Python from 3.10 on, as python3.X or in ~/.pyenv/versions")
    python, theirs = found
    said = submit(environment={"PYSPARK_PYTHON": python}).fail()
    mine = ".".join(platform.python_version_tuple()[:2])
    assert (
        f"TrainingFailedError: the job cannot go on in Spark: executors run Python {theirs}, the driver {mine}" in said
    )
    assert "Set PYSPARK_PYTHON" in said


def with_torch_on_one(tmp_path: Path, torch: str) -> dict[str, str]:
    """Return the environment of a job of which one executor has another torch by its packages, which is all that ours look at."""
    packages = tmp_path / "packages"
    (packages / f"torch-{torch}.dist-info").mkdir(parents=True)
    (packages / f"torch-{torch}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
    )
    python = tmp_path / "python"
    # Executors run in folders that have their numbers as names.
    python.write_text(
        f'#!/bin/sh\ncase "$PWD" in */1) export PYTHONPATH="{packages}:$PYTHONPATH";; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return {"PYSPARK_PYTHON": str(python)}


def test_another_minor_version_of_torch_is_an_error_that_names_both(submit: Submit, tmp_path: Path) -> None:
    said = submit(environment=with_torch_on_one(tmp_path, "99.1"), given={"min_np": 2}).fail()
    error = next(
        line for line in said.splitlines() if "workers of one job need the same minor version everywhere" in line
    )
    assert "99.1" in error
    assert version("torch") in error


def test_two_patch_releases_of_torch_are_both_named_and_training_goes_on(submit: Submit, tmp_path: Path) -> None:
    other = ".".join([*version("torch").split(".")[:2], "99"])
    job = submit(environment=with_torch_on_one(tmp_path, other))
    job.strike()
    job.end()
    warnings = [line for line in job.log().splitlines() if "install the same everywhere" in line]
    assert warnings
    assert all(other in line and version("torch") in line for line in warnings)
