"""The whole of it: a pipeline of SQL and an estimator, while the cluster grows and loses executors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from application import Application
from reports import wait_for_world

IDLE_SECONDS = 3.0
# What Spark needs at most besides.
RELEASE_SECONDS = 10.0
PIPELINE = Path(__file__).parents[1] / "pipeline.py"
SETTINGS = {
    "spark.decommission.enabled": "true",
    # Else executors that hold what a join has shuffled are kept, however idle.
    "spark.dynamicAllocation.shuffleTracking.timeout": "3s",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_a_pipeline_fits_while_the_cluster_grows_from_one_executor_to_four_and_loses_two(
    kubernetes: Any, submitted: Any, tmp_path: Path, mode: str
) -> None:
    cluster, folder = kubernetes(first=1, drivers=1 if mode == "cluster" else 0), tmp_path / "pipeline"
    place = {"spark.kubernetes.driver.node.selector.kubernetes.io/hostname": "drivers"}
    application = submitted(
        Application(cluster, folder, PIPELINE, str(folder), mode=mode, settings={**SETTINGS, **place})
    )
    (alone,) = wait_for_world(folder, 1)
    cluster.set_room("second", 3)
    world = wait_for_world(folder, 4, after=alone.generation)
    cluster.set_room("second", 1)
    killed, evicted = [
        name for name in map(cluster.pod_of, (worker.pid for worker in world)) if cluster.node_of(name) == "second"
    ][:2]
    cluster.kill(killed)
    cluster.evict(evicted)
    wait_for_world(folder, 2, after=world[0].generation)
    (folder / "stop").touch()
    assert application.finish(120) == 0, application.log()[-6000:]
    assert [pod.phase for pod in cluster.pods("driver")] == (["Succeeded"] if mode == "cluster" else [])
    result = json.loads((folder / "result.json").read_text())
    assert result["rows"] == [2000], "rows were lost or counted twice"
    assert result["right"] > 0.9
    assert {1, 2} <= set(result["sizes"])  # the world of four may have been struck before its first commit
    assert max(result["release"]) < IDLE_SECONDS + RELEASE_SECONDS
    cluster.wait_for(lambda pods: not pods)
