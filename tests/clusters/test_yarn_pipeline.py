"""A user's pipeline on YARN, from SQL to scores, while the cluster grows and shrinks beneath it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from reports import wait_for_world
from yarn_cluster import Yarn

pytestmark = pytest.mark.long

PIPELINE = Path(__file__).parent / "pipeline.py"
IDLE_SECONDS = 5.0
# What Spark needs at most to give back an executor that has been idle for as long as it may, or whose shuffles have.
RELEASE_SECONDS = 10.0


@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_a_pipeline_fits_while_the_cluster_grows_to_four_executors_and_loses_two(
    yarn: Yarn, tmp_path: Path, mode: str
) -> None:
    growth = {"spark.dynamicAllocation.initialExecutors": 1, "spark.dynamicAllocation.maxExecutors": 4}
    submitted = yarn.submit(PIPELINE, str(tmp_path), mode=mode, settings=growth)
    world = wait_for_world(tmp_path, 4, driver=submitted)
    (before,) = yarn.applications()
    os.kill(world[1].executor(), signal.SIGKILL)
    world = wait_for_world(tmp_path, 4, world[0].generation, submitted)
    victim = world[2].executor()
    yarn.preempt(next(one for one in yarn.executors() if one.pid == victim))
    wait_for_world(tmp_path, 4, world[0].generation, submitted)
    (after,) = yarn.applications()
    assert after.released == before.released, "executors were given back while the fit needed them"
    assert after.most_wanted == 4
    (tmp_path / "stop").touch()
    assert submitted.wait(200) == 0
    assert yarn.ended().end == "SUCCEEDED"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rows"] == [2000], "every row counted once in every epoch"
    assert max(result["sizes"]) == 4
    assert result["right"] > 0.95
    assert max(result["release"]) < IDLE_SECONDS + RELEASE_SECONDS
