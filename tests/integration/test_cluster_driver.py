"""Jobs whose driver runs in a slot of the cluster, on real executors: one of four is the driver's, one carries what it tells."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import networks
import psutil
import pytest
from busy import busy
from decommission import train_through_a_decommission
from descendants import descendants
from jobs import check
from processes import ports_of
from standalone import executor_of
from training import MANY_STEPS, count_steps, touch_and_grow, wait_for_a_file

import spark_elastic
from spark_elastic import JobCancelledError, TrainingFailedError
from spark_elastic.estimator import slots
from spark_elastic.testing import kill

cloudpickle.register_pickle_by_value(networks)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
EXECUTORS = 4
WORKERS = 2
SETTLE_SECONDS = 30.0


def make_bytes(count: int) -> bytes:
    """Return as many bytes, which depend on the rank, and cannot be compressed."""
    import random

    import spark_elastic as se

    return se.elastic(lambda state: random.Random(se.rank()).randbytes(count))(se.ObjectState(step=0))


def once(kind: str, act: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    """What to give as ``on_event``: calls ``act`` at the first event of a kind, on a thread of its own."""
    seen: list[Any] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == kind and not seen:
            seen.append(event)
            threading.Thread(target=act).start()

    return note


def drivers() -> list[psutil.Process]:
    """The processes of tasks that run a job's driver. No other task listens, but on what it has of the daemon that forked it."""
    return [process for process in descendants() if _is_driver(process)]


def _is_driver(process: psutil.Process) -> bool:
    try:
        parent = process.parent()
        is_task = "pyspark.daemon" in process.cmdline() and parent and not parent.name().startswith("java")
        return bool(is_task and ports_of(process) - ports_of(parent))
    except psutil.Error:  # it has just ended
        return False


def no_driver_is_left() -> bool:
    """Whether all drivers have ended. The session of these tests does not kill the processes of tasks that it has cancelled."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while drivers() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not drivers()


def kill_the_drivers_executor() -> None:
    (driver,) = drivers()
    executor_of(driver.pid).kill()


def test_events_output_and_results_come_through_the_session_alone(
    run_on_spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, during = ports_of(psutil.Process()), []

    def formed() -> None:
        during.append(ports_of(psutil.Process()))
        (tmp_path / "formed").touch()

    result = run_on_spark(
        wait_for_a_file, str(tmp_path / "formed"), driver="cluster", max_np=WORKERS, on_event=once("world_formed", formed),
    )  # fmt: skip
    assert result.results == ["rank 0 of 2", "rank 1 of 2"]
    assert during == [before]
    kinds = [event["event"] for event in result.events]
    assert kinds[0] == "job_started"
    # A host that offers itself as the job ends may still tell its facts.
    assert [kind for kind in kinds if not kind.startswith("host_")][-1] == "job_finished"
    assert capsys.readouterr().out.count("a worker begins") == WORKERS


def test_results_that_an_executor_could_not_hold_at_once_come_in_parts(spark: Any) -> None:
    results = spark_elastic.run(
        make_bytes, (70_000_000,), spark=spark, num_proc=WORKERS, max_np=WORKERS, driver="cluster"
    )
    assert results == [random.Random(rank).randbytes(70_000_000) for rank in range(WORKERS)]


def test_arguments_of_more_than_one_task_may_carry_reach_the_workers(spark: Any) -> None:
    data = random.Random(0).randbytes(140_000_000)
    results = spark_elastic.run(zlib.crc32, args=(data,), spark=spark, num_proc=1, max_np=1, driver="cluster")
    assert results == [zlib.crc32(data)]


def test_a_killed_worker_costs_no_committed_step(run_on_spark: Any) -> None:
    result = run_on_spark(
        count_steps,
        60,
        0.02,
        driver="cluster",
        min_np=1,
        num_proc=WORKERS,
        max_np=WORKERS,
        faults=[kill(rank=1, step=20)],
    )
    check(result, 60)
    assert result.faults == 1
    # The next world may be the survivor's, or be formed when another worker is there already.
    assert result.sizes[0] == WORKERS
    assert len(result.sizes) > 1


def test_the_world_grows_when_a_core_becomes_free(spark: Any, run_on_spark: Any, tmp_path: Path) -> None:
    # Beside the driver there is one core for a worker, and none for queries: what the driver tells arrives late.
    with busy(spark, 2, tmp_path / "busy") as free:
        result = run_on_spark(
            touch_and_grow, str(free), WORKERS, driver="cluster", min_np=1, num_proc=1, max_np=WORKERS
        )
    assert result.results == [WORKERS] * WORKERS
    assert result.sizes == [1, WORKERS]


def test_a_worker_leaves_its_decommissioned_executor_ahead_of_it_and_costs_no_step(spark: Any, tmp_path: Path) -> None:
    train_through_a_decommission(spark, tmp_path, driver="cluster")


def test_a_job_with_a_checkpoint_outlives_its_drivers_executor_and_counts_every_step_once(
    run_on_spark: Any, tmp_path: Path
) -> None:
    restored = tmp_path / "restored"
    kill_once = once("checkpoint_written", kill_the_drivers_executor)

    def watch(event: dict[str, Any]) -> None:
        kill_once(event)
        if event["event"] == "checkpoint_restored":
            restored.touch()

    result = run_on_spark(
        count_steps, MANY_STEPS, 0.05, kwargs={"until": str(restored)}, driver="cluster", min_np=WORKERS, max_np=WORKERS,
        checkpoint=tmp_path / "saved", checkpoint_interval=0, on_event=watch,
    )  # fmt: skip
    check(result, result.steps)
    assert [event["attempt"] for event in result.of("job_started")] == [1, 2]
    assert result.of("checkpoint_restored")[0]["values"]["step"] > 0
    assert no_driver_is_left()


def test_without_a_checkpoint_the_loss_of_the_drivers_executor_is_an_error_that_says_what_would_have_helped(
    run_on_spark: Any,
) -> None:
    with pytest.raises(
        TrainingFailedError, match=r"driver was lost.*With checkpoint= the job goes on by itself"
    ) as raised:
        run_on_spark(
            count_steps, 10**6, 0.02, driver="cluster", min_np=WORKERS, max_np=WORKERS,
            on_event=once("world_formed", kill_the_drivers_executor),
        )  # fmt: skip
    assert raised.value.events[-1]["event"] == "job_failed"


def test_cancelled_spark_jobs_cancel_the_job_and_leave_nothing(spark: Any, run_on_spark: Any) -> None:
    with pytest.raises(JobCancelledError, match="its Spark jobs were cancelled"):
        run_on_spark(
            count_steps, 10**6, 0.02, driver="cluster", min_np=WORKERS, max_np=WORKERS,
            on_event=once("world_formed", spark.sparkContext.cancelAllJobs),
        )  # fmt: skip
    assert no_driver_is_left()


def test_the_driver_of_a_fit_runs_in_a_slot_and_its_workers_have_the_slots_that_are_left(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = spark_elastic.run, ports_of(psutil.Process())
    ports, free = [], []

    def look(event: dict[str, Any]) -> None:
        ports.append(ports_of(psutil.Process()))
        free.append(slots.ledger._free(EXECUTORS))

    def run_and_look(*args: Any, **settings: Any) -> Any:
        assert settings["max_np"] == WORKERS
        return run(*args, **{**settings, "on_event": look})

    monkeypatch.setattr(spark_elastic, "run", run_and_look)
    with busy(spark, EXECUTORS, tmp_path / "busy"):
        pass  # now all executors are there, also one that replaces another
    model = networks.row_counter(200, driver="cluster").fit(spark.range(200, numPartitions=2))
    assert ports, "nothing was told"
    assert all(each == before for each in ports), f"the driver listens here: {ports}, {before} before"
    assert set(free) == {0}, "other fits may take the driver's slots"
    assert model.model.seen.tolist() == pytest.approx([1.0] * 200)


def press_ctrl_c() -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)


@pytest.mark.parametrize("driver", ["client", "cluster"])
def test_ctrl_c_before_the_slots_have_started_ends_the_job_and_leaves_nothing(
    driver: str, spark: Any, run_on_spark: Any, tmp_path: Path
) -> None:
    def jobs() -> set[int]:
        return set(spark.sparkContext.statusTracker().getActiveJobsIds())

    def wait_and_press() -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while jobs() <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        press_ctrl_c()

    # A driver that has to find its slot first is far from a world then; one that is here is, as no slot can start.
    with busy(spark, EXECUTORS, tmp_path / "busy") if driver == "client" else contextlib.nullcontext():
        before = jobs()
        threading.Thread(target=wait_and_press).start()
        with pytest.raises(KeyboardInterrupt) as raised:
            run_on_spark(count_steps, 10**6, 0.02, driver=driver, min_np=WORKERS, max_np=WORKERS)
    assert "world_formed" not in [event["event"] for event in raised.value.events]  # type: ignore[attr-defined]
    assert no_driver_is_left()


@pytest.mark.parametrize("driver", ["client", "cluster"])
def test_ctrl_c_while_workers_train_ends_the_job_and_leaves_nothing(driver: str, run_on_spark: Any) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        run_on_spark(
            count_steps, 10**6, 0.02, driver=driver, min_np=WORKERS, max_np=WORKERS,
            on_event=once("world_formed", press_ctrl_c),
        )  # fmt: skip
    assert raised.value.events[-1]["event"] == "job_failed"  # type: ignore[attr-defined]
    assert no_driver_is_left()
