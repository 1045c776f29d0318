"""The driver in a pod of its own, which executors find by the name of a headless service; several applications."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from application import Training


@pytest.mark.long
def test_a_driver_in_a_pod_is_found_by_its_service_and_pod_templates_and_local_disks_hold(
    kubernetes: Any, submitted: Any, tmp_path: Path
) -> None:
    cluster = kubernetes(drivers=1, others=2, chosen=2)
    template = {
        "metadata": {"labels": {"team": "training"}},
        "spec": {"nodeSelector": {"kubernetes.io/hostname": "chosen"}, "terminationGracePeriodSeconds": 20},
    }
    (tmp_path / "template.yml").write_text(json.dumps(template))
    settings = {
        "spark.kubernetes.driver.node.selector.kubernetes.io/hostname": "drivers",
        "spark.kubernetes.executor.podTemplateFile": str(tmp_path / "template.yml"),
        # Else, from Spark 4.3 on, executors are told the driver's address.
        "spark.kubernetes.executor.useDriverPodIP": "false",
        "spark.decommission.enabled": "true",
    }
    job = submitted(Training(cluster, tmp_path / "job", "cluster", settings, min_np=1, max_np=2))
    world = job.wait_for_size(2)
    assert [pod.node for pod in cluster.pods("driver")] == ["drivers"]
    for pod in cluster.pods():
        assert (pod.node, pod.labels["team"]) == ("chosen", "training")
        assert "-driver-svc.default.svc:" in cluster.environment_of(pod.name)["SPARK_DRIVER_URL"]
        assert list(cluster.folder_of(pod.name).glob("volumes/spark-local-dir-1/blockmgr-*"))
    cluster.evict(cluster.pod_of(world.workers[0]))
    job.wait_for_size(2, after=world.generation)
    assert not job.events("world_broken")
    assert len(job.enough()) == 2
    job.leave()  # what spark-submit returns says nothing of the driver
    assert [(pod.phase, pod.code) for pod in cluster.pods("driver")] == [("Succeeded", 0)]
    cluster.wait_for(lambda pods: not pods)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_a_job_whose_driver_is_lost_goes_on_from_its_checkpoint_when_it_is_submitted_again(
    kubernetes: Any, submitted: Any, tmp_path: Path, mode: str
) -> None:
    cluster = kubernetes(node=3)
    given = {"min_np": 2, "max_np": 2, "checkpoint": str(tmp_path / "saved"), "checkpoint_interval": 0.5}
    first = submitted(Training(cluster, tmp_path / "first", mode, **given))
    first.wait_for_size(2)
    first.wait_for(lambda: first.steps()[-1]["step"] >= 50)
    if mode == "cluster":
        (driver,) = cluster.pods("driver")
        cluster.kill(driver.name)
    else:
        first.end()
    cluster.wait_for(lambda pods: not any(pod.is_alive for pod in pods))
    first.finish()
    last = first.steps()[-1]["step"]
    second = submitted(Training(cluster, tmp_path / "second", mode, **given))
    second.wait_for_size(2)
    assert 1 < second.steps()[0]["step"] <= last + 1
    second.enough()
    second.leave()
    assert [pod.phase for pod in cluster.pods("driver")] == (["Failed", "Succeeded"] if mode == "cluster" else [])


@pytest.mark.long
def test_two_applications_share_a_cluster_and_one_grows_when_the_other_ends(
    kubernetes: Any, submitted: Any, tmp_path: Path
) -> None:
    cluster = kubernetes(node=3)
    first = submitted(Training(cluster, tmp_path / "first", min_np=2, max_np=2))
    world = first.wait_for_size(2)
    second = submitted(Training(cluster, tmp_path / "second", min_np=1, max_np=2))
    alone = second.wait_for_size(1)
    assert first.steps()[-1]["generation"] == world.generation, "the first was disturbed"
    first.enough()
    second.wait_for_size(2, after=alone.generation)
    assert first.leave() == 0
    second.enough()
    assert second.leave() == 0
