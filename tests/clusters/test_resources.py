"""GPUs and cores for the stages of one job, on a real standalone master whose workers invent their GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import SUPPORT
from standalone import Standalone

GPUS = ("3", "MIG-1c2d3e4f")

pytestmark = pytest.mark.long


@pytest.fixture
def cluster(nothing_left: None, tmp_path: Path) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path)
    for gpu in GPUS:
        cluster.add_worker(gpu=gpu)
    yield cluster
    cluster.end()


@pytest.mark.parametrize("allocation", ["fixed", "dynamic"])
def test_a_job_gets_gpus_that_the_session_gives_to_no_other_task(
    cluster: Standalone, tmp_path: Path, allocation: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "resources_script.py"), cluster.url, allocation],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "; ".join(f"sees GPU {gpu} as cuda:0" for gpu in GPUS),
        "a plain Spark task has []",
        "profiles: [0, 1]",  # the default one, and one for both jobs
        "equal profiles of the user's: 1",
    ]
