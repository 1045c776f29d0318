"""The shortest job on YARN that a cluster can disturb, in make test."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from reports import wait_for_world
from yarn_cluster import Yarn

JOB = Path(__file__).parent / "job.py"


def test_a_job_on_yarn_outlives_a_killed_executor_and_succeeds(yarn: Yarn, tmp_path: Path) -> None:
    submitted = yarn.submit(JOB, str(tmp_path), "1", "2")
    world = wait_for_world(tmp_path, 2)
    os.kill(world[1].executor(), signal.SIGKILL)
    wait_for_world(tmp_path, 2, after=world[0].generation)
    (tmp_path / "stop").touch()
    assert submitted.wait(200) == 0
    (application,) = yarn.applications()
    assert (application.state, application.end) == ("FINISHED", "SUCCEEDED")
    for worker in json.loads((tmp_path / "result.json").read_text())["workers"]:
        assert worker["counted"] == worker["steps"]
