"""Nothing outlives its job, whichever process dies and how; and the job runs on every kind of Spark master."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import many_runs
import psutil
import pytest
import training
from other_processes import GONE_SECONDS, alive, assert_gone, finish, wait_for, wait_until
from settling import assert_settles
from standalone import Standalone

import spark_elastic


@pytest.fixture
def job(spark: Any, tmp_path: Path) -> Iterator[Callable[[], tuple[Any, list[int]]]]:
    """A job of two workers with children of every kind; the call tells of the host of the present rank 1, and gives pids."""

    facts: dict[int, Any] = {}
    hosts: dict[int, Any] = {}

    def note(event: dict[str, Any]) -> None:
        print(event)  # pytest shows it if the test fails
        if event["event"] == "host_facts":
            facts[event["host"]] = event["facts"]
        elif event["event"] == "worker_started":
            hosts[event["pid"]] = facts[event["host"]]

    def train() -> None:
        spark_elastic.run(training.die_quietly, args=(str(tmp_path),), spark=spark, min_np=2, max_np=2, on_event=note)

    def next_pids() -> tuple[Any, list[int]]:
        pids = wait_for(tmp_path / "1")
        (tmp_path / "1").unlink()  # only the next world writes it again
        wait_until(lambda: pids[0] in hosts, "the event of the worker's start")
        return hosts[pids[0]], pids

    thread = threading.Thread(target=train)
    thread.start()
    yield next_pids
    (tmp_path / "stop").touch()
    thread.join(timeout=250)
    assert not thread.is_alive()


def test_whichever_process_dies_what_it_started_goes_with_it_and_the_job_goes_on(
    job: Callable[[], tuple[Any, list[int]]],
) -> None:
    # A killed worker leaves its warm parent, which forks the replacement.
    _, (worker, parent, *rest) = job()
    assert len(rest) == 3
    os.kill(worker, signal.SIGKILL)
    assert_gone([worker, *rest])
    assert alive([parent])

    # A killed warm parent takes its worker along; the task raises, and Spark starts it again.
    _, pids = job()
    os.kill(pids[1], signal.SIGKILL)
    assert_gone(pids)

    # So does a killed task, also when the worker is stopped and cannot notice.
    host, pids = job()
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(host["pid"], signal.SIGKILL)
    assert_gone(pids)

    # And an executor.
    host, pids = job()
    os.kill(host["executor_pid"], signal.SIGKILL)
    assert_gone(pids)
    job()


def test_runs_one_after_the_other_leave_memory_descriptors_and_threads_flat(spark: Any) -> None:
    measured = [many_runs.run_once(spark) for _ in range(2 + 4)][1:]
    first, last = measured[0], measured[-1]
    # Spark may have ended its Python processes after a run.
    with_tasks = [held for held in measured if held.task_descriptors] or [last]
    print(*measured, sep="\n")

    def grown() -> dict[str, tuple[int, int]]:
        """What more is held than after the first runs: for a moment a run may leave a thread or a connection that is ending."""
        now = many_runs.measure()
        found = {name: (getattr(first, name), getattr(now, name)) for name in ("driver_threads", "driver_descriptors")}
        found["task_descriptors"] = (with_tasks[0].task_descriptors, now.task_descriptors)
        return {name: (before, after) for name, (before, after) in found.items() if after > before}

    assert_settles(grown, GONE_SECONDS)
    assert last.driver_bytes - first.driver_bytes < 8 * many_runs.MIB
    assert with_tasks[-1].task_bytes - with_tasks[0].task_bytes < 8 * many_runs.MIB


def test_a_killed_driver_leaves_nothing_on_the_executors(script: Any, tmp_path: Path) -> None:
    process = script("local-cluster[2,1,1024]", "killed")
    pids = wait_for(tmp_path / "killed" / "0") + wait_for(tmp_path / "killed" / "1")
    process.kill()
    assert_gone(pids)


def test_importers_that_are_kept_for_the_next_job_end_with_what_they_belong_to(script: Any, tmp_path: Path) -> None:
    process = script("local-cluster[2,1,1024]", "kept")
    wait_until((tmp_path / "kept" / "importers").exists, "two jobs were to run", process)
    one, task, daemon, other = wait_for(tmp_path / "kept" / "importers")
    # Not to the Spark Python process that has started it, which Spark may have ended already.
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(task).kill()
    assert_gone([task])
    assert len(alive([one, other])) == 2
    # To the process that Spark forks these from.
    psutil.Process(daemon).kill()
    assert_gone([one])
    assert alive([other])
    # And to an executor, which ends with the driver.
    process.kill()
    assert_gone([other])


def test_shutdown_ends_the_importers_on_executors_and_leaves_a_running_job_alone(script: Any) -> None:
    assert "shut down" in finish(script("local-cluster[2,2,1024]", "shut down"))


def test_on_local_threads_a_paused_driver_is_no_hang_losses_are_survived_and_a_stopped_context_ends_the_run(
    script: Any, tmp_path: Path
) -> None:
    process = script("local[2]", "paused", "trained", "stopped")
    wait_for(tmp_path / "paused" / "0")
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(9)  # more than twice heartbeat_timeout
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(6)  # in which a hang would be declared
    (tmp_path / "paused" / "stop").touch()
    out = finish(process)
    assert "generations {1}" in out
    assert "equal 2" in out
    assert "the SparkContext was stopped" in out
    assert float(out.rsplit(" after ", 1)[1].split()[0]) < 100  # elastic_timeout has ten minutes
    assert_gone(wait_for(tmp_path / "stopped" / "0"))


def test_with_too_few_executors_left_after_exclude_on_failure_a_job_goes_on_or_ends_in_time(script: Any) -> None:
    out = finish(script("local-cluster[2,1,1024]", "excluded"))
    assert "workers left 1 steps 30" in out
    assert "only 1 of min_np=2 workers were left 5 s (elastic_timeout)" in out


def test_executors_that_cannot_import_us_or_torch_end_the_job_and_gpus_reach_their_workers(script: Any) -> None:
    out = finish(script("local-cluster[1,1,1024]", "no package"))
    assert "executors cannot run spark_elastic: " in out
    assert "bare-python there says ModuleNotFoundError: No module named 'spark_elastic'. Before the session" in out
    out = finish(script("local-cluster[1,1,1024]", "gpu", "broken torch"))
    assert "\nsees GPU 7 as cuda:0" in "\n" + out
    assert "asked for, sees GPU 7 as cuda:0" in out
    assert "ImportError: libtorch.so is damaged" in out


def test_without_a_session_a_local_cluster_is_made_and_ended(script: Any) -> None:
    process = script("", "default session")
    words = process.stdout.readline().split()
    assert words[:2] == ["ran", "below"], process.communicate()
    assert process.poll() is None
    assert_gone([int(words[2])])
    assert not Path(words[4]).exists(), (
        "Spark keeps its executors' logs in its own folder, and nobody else removes them"
    )
    process.kill()


def test_training_lives_through_faults_on_a_standalone_cluster(script: Any, standalone: Standalone) -> None:
    for _ in range(2):
        standalone.add_worker()
    assert "equal" in finish(script(standalone.url, "trained"))
