"""Jobs on YARN, in both deploy modes, and what a YARN cluster does to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest
from reports import Worker, events, kinds, newest_step, wait_for, wait_for_world
from yarn_cluster import Container, Yarn

pytestmark = pytest.mark.long

JOB = Path(__file__).parent / "job.py"
END_SECONDS = 200.0
# What Spark needs at most to give back an executor that has been idle for as long as it may.
RELEASE_SECONDS = 10.0


def finish(folder: Path, submitted: subprocess.Popen[bytes]) -> dict[str, Any]:
    """End the job; return what it has left. Every step has counted once, on every worker."""
    (folder / "stop").touch()
    assert submitted.wait(END_SECONDS) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    for worker in result["workers"]:
        assert worker["counted"] == worker["steps"]
    return result


def container_of(yarn: Yarn, worker: Worker) -> Container:
    executor = worker.executor()
    return next(one for one in yarn.executors() if one.pid == executor)


def host_without_master(yarn: Yarn) -> str:
    masters = {one.host for one in yarn.containers() if one.is_master}
    return next(one.host for one in yarn.executors() if one.host not in masters)


def test_slots_bring_as_many_executors_as_are_wanted_and_none_is_released_before_the_end(
    yarn: Yarn, tmp_path: Path
) -> None:
    submitted = yarn.submit(
        JOB, str(tmp_path), "1", "4", settings={"spark.dynamicAllocation.executorIdleTimeout": "2s"}
    )
    world = wait_for_world(tmp_path, 4)
    os.kill(world[1].pid, signal.SIGKILL)
    world = wait_for_world(tmp_path, 4, after=world[0].generation)
    yarn.preempt(container_of(yarn, world[1]))
    wait_for_world(tmp_path, 4, after=world[0].generation)
    # Of 0.05 s each, so that executors which Spark took for idle would be gone by then.
    enough = newest_step(tmp_path) + 100
    wait_for(lambda: newest_step(tmp_path) >= enough, "a hundred more steps")
    (application,) = yarn.applications()
    assert application.most_wanted == 4
    assert application.released == 0
    assert finish(tmp_path, submitted)["release"] < 2.0 + RELEASE_SECONDS
    assert yarn.ended().end == "SUCCEEDED"
    sizes = [event["size"] for event in events(tmp_path) if event["event"] == "world_formed"]
    assert sizes[0] < 4, "it began before all executors were there"


@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_workers_leave_a_node_that_is_drained_without_a_lost_step(yarn: Yarn, tmp_path: Path, mode: str) -> None:
    submitted = yarn.submit(JOB, str(tmp_path), "1", "4", mode=mode)
    world = wait_for_world(tmp_path, 4)
    before = len(events(tmp_path))
    host = host_without_master(yarn)
    drained = [one for one in yarn.executors() if one.host == host]
    yarn.decommission(host, 60.0)
    wait_for_world(tmp_path, 4, after=world[0].generation)
    since = kinds(events(tmp_path)[before:])
    assert since.count("host_draining") == len(drained)
    assert "world_interrupted" in since
    assert "world_broken" not in since
    ends = {one.id: one.code for one in yarn.containers() if one.has_ended}
    assert [ends.get(one.id) for one in drained] == [0] * len(drained), "they ended by themselves"
    finish(tmp_path, submitted)


def test_a_lost_node_and_a_container_killed_for_its_memory_are_survived_in_cluster_mode(
    yarn: Yarn, tmp_path: Path
) -> None:
    submitted = yarn.submit(JOB, str(tmp_path), "1", "3", mode="cluster")
    world = wait_for_world(tmp_path, 3)
    hungry = container_of(yarn, world[1])
    (tmp_path / f"eat-{world[1].pid}").touch()
    world = wait_for_world(tmp_path, 3, after=world[0].generation)
    ended = next(one for one in yarn.containers() if one.id == hungry.id)
    assert ended.code == -104
    assert "physical memory used" in ended.diagnostics
    master = next(one for one in yarn.containers() if one.is_master)
    said = (master.folder / "logs" / "stderr").read_text()
    assert "Consider boosting spark.executor.memoryOverhead" in said

    yarn.lose(host_without_master(yarn), 2.0)
    wait_for_world(tmp_path, 3, after=world[0].generation)
    finish(tmp_path, submitted)


def test_a_second_attempt_goes_on_where_the_first_master_was_killed(yarn: Yarn, tmp_path: Path) -> None:
    submitted = yarn.submit(JOB, str(tmp_path), "1", "2", mode="cluster")
    first = {worker.pid for worker in wait_for_world(tmp_path, 2)}
    wait_for(lambda: "checkpoint_written" in kinds(events(tmp_path)), "a checkpoint")
    (master,) = (one for one in yarn.containers() if one.is_master)
    os.kill(master.pid, signal.SIGKILL)
    wait_for(lambda: not first & {worker.pid for worker in wait_for_world(tmp_path, 2)}, "a world of other workers")
    finish(tmp_path, submitted)
    (application,) = yarn.applications()
    assert application.attempt == 2
    restored = [event["values"]["step"] for event in events(tmp_path) if event["event"] == "checkpoint_restored"]
    assert restored
    assert restored[0] > 0


def test_a_job_whose_driver_was_lost_goes_on_when_it_is_submitted_again(yarn: Yarn, tmp_path: Path) -> None:
    submitted = yarn.submit(JOB, str(tmp_path), "1", "2")
    first = {worker.pid for worker in wait_for_world(tmp_path, 2)}
    wait_for(lambda: "checkpoint_written" in kinds(events(tmp_path)), "a checkpoint")
    submitted.kill()
    yarn.ended()
    submitted = yarn.submit(JOB, str(tmp_path), "1", "2")
    wait_for(lambda: not first & {worker.pid for worker in wait_for_world(tmp_path, 2)}, "a world of other workers")
    finish(tmp_path, submitted)
    restored = [event["values"]["step"] for event in events(tmp_path) if event["event"] == "checkpoint_restored"]
    assert restored
    assert restored[0] > 0


def test_two_applications_share_what_there_is(nothing_left: None, yarn_classes: Path, tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    for folder in (large, small):
        folder.mkdir()
    # Room for two masters and three executors.
    with Yarn(yarn_classes, tmp_path, nodes=1, cores=5) as yarn:
        first = yarn.submit(JOB, str(large), "1", "3")
        world = wait_for_world(large, 3)
        second = yarn.submit(JOB, str(small), "1", "1")
        waiting = wait_for(
            lambda: [one for one in yarn.applications()[1:] if one.most_wanted], "the second application"
        )
        assert [one for one in yarn.executors() if one.application == waiting[0].id] == []
        yarn.preempt(container_of(yarn, world[2]))
        wait_for_world(small, 1)
        world = wait_for_world(large, 2)
        finish(small, second)
        wait_for_world(large, 3, after=world[0].generation)
        finish(large, first)


def test_python_comes_from_an_archive_that_yarn_unpacks_in_each_container(yarn: Yarn, tmp_path: Path) -> None:
    """The archive has an environment's interpreter and settings; the packages are this environment's, by a path in it."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(own, "packages.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(environment, ".")
    python = "./environment/bin/python"
    submitted = yarn.submit(
        JOB, str(tmp_path), "2", "2", mode="cluster", python=python, options=("--archives", f"{archive}#environment"),
        settings={"spark.yarn.appMasterEnv.PYSPARK_PYTHON": python},
    )  # fmt: skip
    world = wait_for_world(tmp_path, 2)
    os.kill(world[1].executor(), signal.SIGKILL)
    wait_for_world(tmp_path, 2, after=world[0].generation)
    result = finish(tmp_path, submitted)
    folders = {str(one.folder) for one in yarn.containers() if not one.is_master}
    for worker in result["workers"]:
        assert worker["python"].removesuffix("/environment") in folders
