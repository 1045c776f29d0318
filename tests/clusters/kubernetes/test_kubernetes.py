"""Spark's Kubernetes back end with the driver outside the cluster: executors in pods that come, go, die and are evicted."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from application import Training, World
from kube import Kubernetes

DECOMMISSIONED = {"spark.decommission.enabled": "true"}


def test_a_killed_pod_is_replaced_and_the_others_train_on(kubernetes: Any, submitted: Any, tmp_path: Path) -> None:
    cluster = kubernetes(node=2)
    job = submitted(Training(cluster, tmp_path / "job", min_np=1, max_np=2))
    world = job.wait_for_size(2)
    cluster.kill(cluster.pod_of(world.workers[1]))
    again = job.wait_for_size(2, after=world.generation)
    assert world.workers[0] == again.workers[0], "the survivor was started again"
    assert len(job.enough()) == 2
    assert job.leave() == 0


@pytest.fixture(scope="class")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    with Kubernetes(tmp_path_factory.mktemp("losses") / "kubernetes", {"node": 3}) as cluster:
        yield cluster


@pytest.fixture(scope="class")
def job(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    job = Training(cluster, tmp_path_factory.mktemp("job"), conf=DECOMMISSIONED, num_proc=3, min_np=1, max_np=3)
    try:
        yield job
        assert job.enough()
        assert job.leave() == 0
    finally:
        job.end()


@pytest.mark.long
class TestLosses:
    """One application of three executors, which each test waits for."""

    @pytest.fixture(autouse=True)
    def nothing_left(self) -> None:
        """The application outlives each test. What ends it leaves nothing, as other tests show."""

    def test_a_killed_worker_is_started_again_in_its_pod(self, cluster: Kubernetes, job: Training) -> None:
        world = job.wait_for_size(3)
        pods = {cluster.pod_of(pid) for pid in world.workers.values()}
        os.kill(world.workers[1], signal.SIGKILL)
        again = job.wait_for_size(3, after=world.generation)
        assert {cluster.pod_of(pid) for pid in again.workers.values()} == pods
        assert repeated(job, world) <= 1

    def test_a_killed_pod_is_lost_and_replaced(self, cluster: Kubernetes, job: Training) -> None:
        self.lose(cluster, job, cluster.kill)

    def test_a_pod_that_is_killed_for_its_memory_is_lost_and_replaced(self, cluster: Kubernetes, job: Training) -> None:
        name = self.lose(cluster, job, lambda pod: cluster.kill(pod, "OOMKilled"))
        last = [change.pod for change in cluster.changes if change.pod.name == name][-1]
        assert (last.code, last.reason) == (137, "OOMKilled")
        assert "OOMKilled" in job.log()

    def lose(self, cluster: Kubernetes, job: Training, act: Callable[[str], None]) -> str:
        """Have a pod of three go at once; return its name."""
        world = job.wait_for_size(3)
        name = cluster.pod_of(world.workers[1])
        act(name)
        job.wait_for_size(2, after=world.generation)
        again = job.wait_for_size(3, after=world.generation)
        assert name not in {cluster.pod_of(pid) for pid in again.workers.values()}
        assert repeated(job, world) <= 1
        return name

    def test_an_evicted_pod_drains_within_its_grace(self, cluster: Kubernetes, job: Training) -> None:
        world = job.wait_for_size(3)
        name = cluster.pod_of(world.workers[1])
        seen = len(job.events())
        cluster.evict(name)
        smaller = job.wait_for_size(2, after=world.generation)
        told = [event["event"] for event in job.events()[seen:]]
        assert smaller.generation == world.generation + 1, "more than one pause"
        assert "host_draining" in told
        assert "world_broken" not in told
        assert repeated(job, world) == 0
        job.wait_for_size(3, after=smaller.generation)
        last = [change.pod for change in cluster.changes if change.pod.name == name][-1]
        assert (last.code, last.reason) == (0, "Completed"), "it was killed at the end of its grace"


@pytest.mark.long
def test_slots_that_wait_bring_as_many_executors_as_are_wanted_and_none_goes_before_the_job_has_ended(
    kubernetes: Any, submitted: Any, tmp_path: Path
) -> None:
    cluster = kubernetes(first=1)
    job = submitted(Training(cluster, tmp_path / "job", conf=DECOMMISSIONED, min_np=1, max_np=4))
    job.wait_for_size(1)
    cluster.set_room("second", 8)
    job.wait_for_size(4)
    time.sleep(3 * 2)  # twice the time for which Spark leaves an executor idle
    assert [pod.phase for pod in cluster.pods()] == ["Running"] * 4
    assert len({change.pod.name for change in cluster.changes}) == 4, "Spark asked for more than was wanted"
    assert len(job.enough()) == 4
    ended = job.wait_for_results()["time"]
    cluster.wait_for(lambda pods: not pods)
    went = [change for change in cluster.changes if change.pod.code is not None]
    assert {change.pod.code for change in went} == {0}
    assert min(change.time for change in went) > ended, "an executor was released before the job had ended"
    print(f"all are released {went[-1].time - ended:.1f} s after the job's end")
    assert job.leave() == 0


@pytest.mark.long
def test_executors_that_no_slot_needs_are_released_while_the_job_trains_on(
    kubernetes: Any, submitted: Any, tmp_path: Path
) -> None:
    cluster = kubernetes(node=3)
    settings = {**DECOMMISSIONED, "spark.dynamicAllocation.initialExecutors": "3"}
    job = submitted(Training(cluster, tmp_path / "job", conf=settings, num_proc=1, min_np=1, max_np=1))
    cluster.wait_for(lambda pods: [pod.phase for pod in pods] == ["Running"] * 3)
    world = job.wait_for_size(1)
    cluster.wait_for(lambda pods: len(pods) == 1)
    assert [pod.name for pod in cluster.pods()] == [cluster.pod_of(world.workers[0])]
    (result,) = job.enough()
    assert job.steps()[-1]["generation"] == world.generation, "the job was disturbed"
    assert result["step"] > 0
    assert job.leave() == 0


@pytest.mark.long
def test_without_decommissioning_an_evicted_pod_does_not_use_its_grace(
    kubernetes: Any, submitted: Any, tmp_path: Path
) -> None:
    cluster = kubernetes(node=2)
    job = submitted(Training(cluster, tmp_path / "job", min_np=1, max_np=2))
    world = job.wait_for_size(2)
    name = cluster.pod_of(world.workers[1])
    cluster.evict(name)
    job.wait_for_size(2, after=world.generation)
    deleted, *_, gone = [change for change in cluster.changes if change.pod.name == name and change.pod.is_terminating]
    print(f"the container is gone {gone.time - deleted.time:.2f} s after SIGTERM")
    assert gone.pod.code == 143
    assert gone.time - deleted.time < 10, "Spark's executors wait for their tasks now: let the worker drain"
    assert job.events("world_broken")
    job.enough()
    assert job.leave() == 0


@pytest.mark.long
def test_without_decommissioning_a_hook_has_the_worker_of_an_evicted_pod_leave_within_its_grace(
    kubernetes: Any, submitted: Any, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "spark_elastic.cli", "leave"]  # users write ["spark-elastic", "leave"]
    container = {"name": "executor", "lifecycle": {"preStop": {"exec": {"command": command}}}}
    (tmp_path / "template.yml").write_text(json.dumps({"spec": {"containers": [container]}}))
    settings = {
        "spark.kubernetes.executor.podTemplateFile": str(tmp_path / "template.yml"),
        "spark.kubernetes.executor.podTemplateContainerName": "executor",
    }
    cluster = kubernetes(node=3)
    job = submitted(Training(cluster, tmp_path / "job", conf=settings, num_proc=3, min_np=1, max_np=3))
    world = job.wait_for_size(3)
    name = cluster.pod_of(world.workers[1])
    cluster.evict(name)
    smaller = job.wait_for_size(2, after=world.generation)
    assert repeated(job, world) == 0
    assert job.events("host_draining")
    again = job.wait_for_size(3, after=smaller.generation)
    assert name not in {cluster.pod_of(pid) for pid in again.workers.values()}
    assert not job.events("world_broken")
    job.enough()
    assert job.leave() == 0


@pytest.mark.long
def test_a_lost_node_is_survived_at_once_and_replaced_when_its_pods_are_forgotten(
    kubernetes: Any, submitted: Any, tmp_path: Path
) -> None:
    cluster = kubernetes(first=1, second=1)
    job = submitted(Training(cluster, tmp_path / "job", min_np=1, max_np=2))
    world = job.wait_for_size(2)
    (lost,) = cluster.lose_node(cluster.node_of(cluster.pod_of(world.workers[1])))
    smaller = job.wait_for_size(1, after=world.generation)
    cluster.set_room("third", 1)
    assert [pod.phase for pod in cluster.pods()] == ["Running"] * 2, "Spark hears of lost nodes"
    cluster.forget(lost)
    job.wait_for_size(2, after=smaller.generation)
    job.enough()
    assert job.leave() == 0


def repeated(job: Training, world: World) -> int:
    """How many of a world's steps the world after it made again."""
    steps: dict[int, set[int]] = {}
    for step in job.steps():
        steps.setdefault(step["generation"], set()).add(step["step"])
    after = min(generation for generation in steps if generation > world.generation)
    return len(steps[world.generation] & steps[after])
