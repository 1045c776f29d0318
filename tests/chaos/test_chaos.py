"""A short piece of chaos; ``make chaos`` for more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_script(name: str, *arguments: str) -> str:
    """Run one of these scripts in a process of its own, as its cluster has a Spark driver of its own; return what it prints."""
    paths = [str(HERE), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def test_nothing_is_lost_in_a_job_that_random_faults_strike() -> None:
    assert "4 faults" in run_script("chaos.py", "--jobs", "1", "--faults", "4", "--seed", "short")


def test_a_host_whose_peers_cannot_be_reached_does_not_cost_the_others_their_job(tmp_path: Path) -> None:
    found = json.loads(run_script("blocked_ports.py", str(tmp_path)).splitlines()[-1])
    if "missing" in found:
        pytest.skip(f"hosts with networks of their own cannot be made here: {found['missing']}")
    assert found["lost"]
    assert not set(found["first"]) & set(found["lost"])
    assert found["kinds"].count("world_broken") >= 3
    assert "job_finished" in found["kinds"]
    assert len(found["results"]) == 2
    assert all(steps == weight > 0 for steps, weight in found["results"])
