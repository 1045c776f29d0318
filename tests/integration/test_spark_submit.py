"""A pipeline script by spark-submit on a standalone cluster; a second application goes on with the run of the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pyspark
import pytest
from standalone import Standalone

import spark_elastic

SCRIPT = Path(__file__).parents[1] / "support" / "pipeline_script.py"
PACKAGE = Path(spark_elastic.__file__).parent


def submit(master: str, *options: str, store: str, epochs: int, workers: int) -> dict[str, Any]:
    """Run spark-submit and return what the script has printed in its last line."""
    home = Path(pyspark.__file__).parent
    settings = {"spark.ui.enabled": "false", "spark.cores.max": str(workers), "spark.executor.memory": "800m"}
    command = [str(home / "bin" / "spark-submit"), "--master", master]
    command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    command += [*options, str(SCRIPT), store, str(epochs), str(workers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(600)
def test_a_pipeline_script_runs_with_the_package_shipped_and_goes_on_with_it_installed(
    standalone: Standalone, tmp_path: Path
) -> None:
    for _ in range(2):
        standalone.add_worker()
    archive, store = tmp_path / "package.zip", str(tmp_path / "store")
    with zipfile.ZipFile(archive, "w") as zipped:
        for file in PACKAGE.rglob("*.py"):
            zipped.write(file, file.relative_to(PACKAGE.parent))
    shipped = submit(standalone.url, "--py-files", str(archive), store=store, epochs=2, workers=2)
    assert all(archive.name in home for home in (shipped["driver"], *shipped["workers"]))
    assert shipped["rows"] == [400] * 2
    assert shipped["generations"][0] >= 3, "a worker and an executor were killed in the first epoch"
    assert shipped["right"] > 320

    installed = submit(standalone.url, store=store, epochs=3, workers=1)
    assert archive.name not in installed["driver"]
    assert [archive.name in home for home in installed["workers"]] == [True, True, False], "the run has gone on"
    assert installed["rows"] == [400] * 3
    assert installed["right"] > 320
