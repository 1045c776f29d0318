"""Benchmarks that reach into the package by name, which no type checker sees: they still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_parts_of_a_step_are_timed() -> None:
    command = [sys.executable, str(BENCHMARKS / "steps.py"), "--parts", "short_in_place", "--local", "--repeats", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    for part in (
        "checks before an optimizer's step",
        "the whole commit",
        "forward beyond torch's",
        "reduction beyond Gloo's",
    ):
        assert part in ran.stdout
