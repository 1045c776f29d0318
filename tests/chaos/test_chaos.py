"""A short piece of chaos; ``make chaos`` for more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_nothing_is_lost_in_a_job_that_random_faults_strike() -> None:
    """In a process of its own, as its cluster has a Spark driver of its own."""
    paths = [str(HERE), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "chaos.py"), "--jobs", "1", "--faults", "4", "--seed", "short"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "4 faults" in done.stdout
