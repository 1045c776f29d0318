"""The shortest job on YARN that a cluster can disturb, in make test."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from reports import events, kinds, wait_for, wait_for_world
from yarn_cluster import Yarn

JOB = Path(__file__).parent / "job.py"


def test_a_job_on_yarn_outlives_a_killed_executor_and_succeeds(yarn: Yarn, tmp_path: Path) -> None:
    def has_gone_on() -> bool:
        said = kinds(events(tmp_path))
        return "world_broken" in said and "stepped" in said[said.index("world_broken") :]

    settings = {"spark.dynamicAllocation.executorIdleTimeout": "1s"}
    submitted = yarn.submit(JOB, str(tmp_path), "1", "2", settings=settings)
    os.kill(wait_for_world(tmp_path, 2)[1].executor(), signal.SIGKILL)
    wait_for(has_gone_on, "a step after the loss")
    (tmp_path / "stop").touch()
    assert submitted.wait(200) == 0
    assert yarn.ended().end == "SUCCEEDED"
    for worker in json.loads((tmp_path / "result.json").read_text())["workers"]:
        assert worker["counted"] == worker["steps"]
