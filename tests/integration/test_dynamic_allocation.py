"""Dynamic allocation on a real standalone master: the world follows the executors that come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from standalone import Standalone

EXAMPLE = Path(__file__).parents[2] / "examples" / "dynamic_allocation.py"


@pytest.fixture
def submitted(standalone: Standalone, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The example, by spark-submit, on a master that has no worker yet."""
    settings = {
        "spark.dynamicAllocation.maxExecutors": "3",
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
        # An executor that is asked for in vain is asked for again after this.
        "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
    }
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", standalone.url]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    with open(tmp_path / "submit.log", "w") as log:
        process = subprocess.Popen(
            [*command, str(EXAMPLE), "--until", str(tmp_path / "stop")],
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def test_pending_slots_bring_executors_the_world_follows_them_and_idle_ones_are_released(
    standalone: Standalone, submitted: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert submitted.stdout is not None

    def wait_for(text: str) -> str:
        """Read until a line holds the text."""
        assert submitted.stdout is not None
        seen = []
        for line in submitted.stdout:
            seen.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in {seen}; {(tmp_path / 'submit.log').read_text()[-3000:]}")

    standalone.add_worker()
    assert wait_for("generation") == "generation 1: 1 workers\n"
    standalone.add_worker()
    third = standalone.add_worker()
    wait_for(": 3 workers")
    third.kill()  # its executor ends with it
    wait_for(": 2 workers")
    (tmp_path / "stop").touch()
    assert "2 workers at the end" in wait_for("steps")
    wait_for("all executors are released")
    assert submitted.wait(60) == 0
