"""A job as a whole: growing and waiting, ends and errors, bad input, several runs, and the small collectives."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import training
from jobs import check
from standalone import executor_of

import spark_elastic
from spark_elastic import (
    JobCancelledError,
    NotEnoughHostsError,
    RanksDifferError,
    ResetLimitExceededError,
    TrainingFailedError,
)
from spark_elastic.driver.failures import FirstSign
from spark_elastic.testing import inject, kill, local_cluster, take_away


def test_the_world_grows_to_max_np_while_training_goes_on(run_on_spark: Any, tmp_path: Path) -> None:
    grown = tmp_path / "grown"

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed" and event["size"] == 3:
            grown.touch()

    result = run_on_spark(
        training.count_steps, training.MANY_STEPS, 0.05, kwargs={"until": str(grown)}, on_event=watch,
        min_np=1, max_np=3, num_proc=1,
    )  # fmt: skip
    check(result, result.steps)
    assert result.sizes[0] < 3
    assert result.sizes[-1] == 3
    # Newcomers boot while steps go on: the pause begins only when they are ready.
    for interrupted in result.of("world_interrupted"):
        ready = [event for event in result.of("worker_ready") if event["generation"] == 0]
        assert any(event["time"] <= interrupted["time"] for event in ready)
    assert not result.of("world_broken")
    assert all(old < new for old, new in result.results[0]["resets"])


def test_workers_leave_ahead_of_decommissions_by_signal_and_by_the_driver_and_no_step_is_lost(
    spark: Any, run_on_spark: Any, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    decommissioned: list[int] = []
    executors: dict[int, psutil.Process] = {}
    members: list[int] = []

    def decommission(event: dict[str, Any]) -> None:
        if event["event"] == "worker_started":
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have left already, with its executor
                executors[event["worker"]] = executor_of(event["pid"])
        elif event["event"] == "world_forming":
            members[:] = event["workers"]
        elif event["event"] == "world_formed" and event["generation"] <= 2:
            worker = max(members)
            decommissioned.append(worker)
            if event["generation"] == 1:
                executors[worker].send_signal(signal.SIGPWR)
            else:
                decommission_by_driver(spark, executors[worker])
        elif event["event"] == "world_formed" and not set(members) & set(decommissioned):
            left.touch()

    result = run_on_spark(
        training.count_steps, training.MANY_STEPS, 0.05, kwargs={"until": str(left)}, on_event=decommission,
        min_np=1, max_np=3, num_proc=3,
    )  # fmt: skip
    check(result, result.steps)
    assert [event["host"] for event in result.of("host_draining")] == [
        event["host"] for worker in decommissioned for event in result.of("worker_started") if event["worker"] == worker
    ]
    assert result.sizes[:2] == [3, 2]
    assert not result.of("world_broken")


def decommission_by_driver(spark: Any, executor: psutil.Process) -> None:
    """As dynamic allocation does, and managers of clusters that tell Spark's driver of machines that go."""
    words = executor.cmdline()
    jvm, backend = spark.sparkContext._jvm, spark.sparkContext._jsc.sc().schedulerBackend()
    nowhere = getattr(getattr(jvm, "scala.None$"), "MODULE$")
    why = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("for a test", nowhere)
    assert backend.decommissionExecutor(words[words.index("--executor-id") + 1], why, False, False)


def test_three_two_one_by_a_discovery_script(run: Any, tmp_path: Path) -> None:
    listed, script, alone = tmp_path / "listed", tmp_path / "hosts", tmp_path / "alone"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    listed.write_text(f"{socket.gethostname()}:3")

    def shrink(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed" and event["size"] > 1:
            listed.write_text(f"{socket.gethostname()}:{event['size'] - 1}")
        elif event["event"] == "world_formed":
            alone.touch()

    result = run(
        training.count_steps, training.MANY_STEPS, 0.05, kwargs={"until": str(alone)}, on_event=shrink,
        host_discovery_script=script, min_np=1, max_np=3, num_proc=3,
    )  # fmt: skip
    check(result, result.steps)
    assert result.sizes == [3, 2, 1]
    assert not result.of("world_broken")


def test_elastic_timeout_ends_a_job_that_stays_below_min_np() -> None:
    with (
        local_cluster(slots=2) as cluster,
        inject(take_away(rank=1, step=20, grace=0)),
        pytest.raises(NotEnoughHostsError, match=r"1 of min_np=2 workers .* \(elastic_timeout\)"),
    ):
        spark_elastic.run(training.count_steps, (1000, 0.02), local=cluster, min_np=2, max_np=2, elastic_timeout=3.0)


def test_too_few_executors_end_the_job_after_start_timeout(run: Any) -> None:
    with pytest.raises(NotEnoughHostsError, match=r"\d of min_np=5 hosts .*start_timeout.*max_np=6"):
        run(training.plain, 1, min_np=5, max_np=6, start_timeout=6.0)


def test_reset_limit_ends_the_job(run: Any) -> None:
    with pytest.raises(ResetLimitExceededError, match="reset_limit=1") as failure:
        run(
            training.count_steps, 60, 0.02, faults=[kill(rank=1, step=10), kill(rank=0, step=30)],
            min_np=1, max_np=2, num_proc=2, reset_limit=1,
        )  # fmt: skip
    assert [entry.rank for entry in failure.value.failures] == [1, 0]


def test_an_exception_on_all_ranks_fails_the_job_within_seconds_with_its_traceback(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match="KeyError") as failure:
        run(training.raise_everywhere, "gone", min_np=2, max_np=2)
    assert "in raise_everywhere" in failure.value.failures[0].traceback
    assert "KeyError: 'gone'" in failure.value.failures[0].traceback


def test_the_same_exception_three_times_without_a_commit_between_fails_the_job(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match="3 times without a commit between") as failure:
        run(training.raise_on_rank, 1, 7, min_np=2, max_np=2)
    assert "row 7 is poisoned" in str(failure.value)


def test_a_function_that_never_commits_fails_the_job_naming_the_setting(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match=r"no worker reached a commit .*hang_timeout=4"):
        run(training.never_commit, min_np=2, max_np=2, hang_timeout=4.0)


def test_rank_above_the_elastic_function_is_an_error_that_says_so(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match="before its first generation a worker belongs to no world"):
        run(training.ask_rank_too_early, min_np=1, max_np=1)


def test_what_would_train_wrongly_ends_the_job_and_says_what_to_do(run: Any) -> None:
    with pytest.raises(
        RanksDifferError, match=r"state\.model\.module\.\w+ has not been the same on rank 1 .* since commit 1\.[34]"
    ):
        run(training.train_wrongly, "inner", min_np=2, max_np=2)
    with pytest.raises(TrainingFailedError, match=r"optimizer=optimizer\)"):
        run(training.train_wrongly, "optimizer", min_np=2, max_np=2)


def test_a_torch_loader_that_gives_all_rows_to_every_rank_is_warned_of_once(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run(training.train_wrongly, "loader", min_np=2, max_np=2)
    assert capfd.readouterr().err.count("UserWarning: a torch DataLoader") == 1


def test_a_rank_that_alone_changes_what_trains_ends_the_job_by_name_long_before_it_counts_as_hung(run: Any) -> None:
    with pytest.raises(
        RanksDifferError, match=r"Linear\.bias ceased to require a gradient on ranks \[0\] only, of 2: ranks \[1\]"
    ) as failure:
        run(training.train_wrongly, "freeze", min_np=2, max_np=2, hang_timeout=300)
    events = failure.value.events  # type: ignore[attr-defined]
    assert not [event for event in events if event["event"] in ("world_broken", "worker_lost")]


def test_a_newcomer_joins_a_model_that_has_grown_in_mid_training(run: Any) -> None:
    # No step reduces anything, so rank 0 is up to two commits ahead: it may have made the ninth when rank 1 dies at its eighth,
    # and begin the eleventh before the newcomer holds any. To begin the twelfth, it has waited for the newcomer's tenth.
    result = run(
        training.grow_in_mid_training, 12, faults=[kill(rank=1, step=8), kill(rank=0, step=12)], min_np=2, max_np=2
    )
    assert result.faults == 2
    one, other = result.results
    assert one == other
    assert len(one["weights"]["words.weight"]) == 6
    assert (one["moments"], one["size"]) == (5, 2)


def test_a_result_that_cannot_be_pickled_is_named(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match="result of fn, of type lock, cannot be pickled"):
        run(training.return_a_lock, min_np=1, max_np=1)


def test_workers_that_crash_before_training_or_cannot_join_fail_the_job(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match="workers crashed 10 times") as failure:
        run(training.crash, 3, min_np=3, max_np=3)
    causes = Counter(failure.cause for failure in failure.value.failures)
    assert causes.pop("exited with code 3 before its result had arrived") >= 10
    assert set(causes) <= {sign.value for sign in FirstSign}, (
        "the job was over before the code of the last ones was known"
    )
    with pytest.raises(TrainingFailedError, match="3 times without a commit") as failure:
        run(training.plain, "x", min_np=1, max_np=1, network_interface="none0")
    assert "network_interface='none0' does not exist here; the interfaces with an address are" in str(failure.value)


def test_a_function_without_an_elastic_part_runs_once_in_each_of_num_proc_workers(run: Any) -> None:
    assert run(training.plain, "x", min_np=1, max_np=3, num_proc=2).results == ["x", "x"]


def test_what_runs_in_spark_after_a_run_gets_its_python_processes_as_they_were(run_on_spark: Any, spark: Any) -> None:
    def look(_: int) -> tuple[int, str]:
        import asyncio
        import os

        return os.getpid(), asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, "looped"))

    events = run_on_spark(training.count_steps, 3, min_np=4, max_np=4).of("host_facts")
    pids, looped = zip(*spark.sparkContext.parallelize(range(4), 4).map(look).collect(), strict=True)
    assert set(pids) <= {event["facts"]["pid"] for event in events}
    assert set(looped) == {"looped"}


def test_the_spark_jobs_of_a_run_that_was_over_at_once_succeed_and_are_not_cancelled(
    run_on_spark: Any, spark: Any
) -> None:
    context = spark.sparkContext
    context.setJobGroup("at-once", "a short run")
    try:
        for _ in range(3):
            run_on_spark(int, min_np=4, max_np=4)
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    tracker = context.statusTracker()
    assert [tracker.getJobInfo(job).status for job in tracker.getJobIdsForGroup("at-once")] == ["SUCCEEDED"] * 12


def test_a_long_evaluation_with_heartbeats_is_not_taken_for_a_hang(run: Any) -> None:
    result = run(training.long_evaluation, 9.0, min_np=2, max_np=2, hang_timeout=4.0)
    assert result.results == [[0, 2, 1], [1, 2, 1]]


def test_a_long_call_that_holds_the_lock_of_python_on_all_ranks_costs_nobody_also_where_an_abort_comes_meanwhile(
    run: Any,
) -> None:
    # The first call begins on both ranks after the first commit; rank 1 dies at the second.
    result = run(
        training.hold_the_lock_of_python, 7.0, faults=[kill(rank=1, step=2)], min_np=2, max_np=2, heartbeat_timeout=4.0
    )
    assert result.results == [[0, 2, 3], [1, 2, 3]]
    assert [event["worker"] for event in result.of("worker_lost")] == [1]


def test_ranks_in_different_collectives_are_sent_back_and_a_result_that_never_comes_ends_the_job_by_name(
    run: Any,
) -> None:
    with pytest.raises(TrainingFailedError, match="rank 1 was lost after training had finished") as failure:
        run(training.wait_for_each_other, min_np=2, max_np=2, hang_timeout=4.0)
    assert "its result had not come 4 s after that of the others" in str(failure.value)
    events = failure.value.events  # type: ignore[attr-defined]
    broken = [event["reason"] for event in events if event["event"] == "world_broken"]
    assert broken == [
        "ranks had waited in different collectives for 4 s (hang_timeout): allreduce on ranks [0], broadcast on ranks [1]"
    ]
    assert [event["worker"] for event in events if event["event"] == "worker_lost"] == [1]


def test_who_waits_for_ever_in_a_group_of_the_users_own_is_sent_back_with_the_others_and_nobody_is_blamed(
    run: Any,
) -> None:
    result = run(training.leave_one_alone_in_a_group, min_np=2, max_np=2, hang_timeout=4.0)
    assert result.results == [[0, 2, 4], [1, 2, 4]]
    assert len(result.of("world_broken")) == 1
    assert result.of("worker_lost") == []


def test_collectives_agree_with_torch_and_local_attributes_stay(run: Any) -> None:
    results = run(training.collectives, min_np=3, max_np=3).results
    for rank, result in enumerate(results):
        assert result["rank"] == result["mine"] == rank
        assert (result["mean"], result["sum"], result["max"]) == (1.0, 3, 2)
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert result["broadcast"] == "from 2"
        assert result["plain"] == [3.0, 3.0]
        assert result["group"] == 3
    assert results[0]["places"] == (0, 3, 0, 1)


def test_a_flood_of_output_holds_up_neither_worker_nor_driver_and_what_is_dropped_is_counted(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = StuckTerminal()
    monkeypatch.setattr("sys.stdout", terminal)
    result = run(training.flood, 300_000, on_event=terminal.open_at_the_end, min_np=1, max_np=1)
    assert result.results == ["dry"]
    text = terminal.getvalue()
    dropped = sum(int(count.replace(",", "")) for count in re.findall(r"… ([\d,]+) lines dropped", text))
    assert dropped > 0
    assert text.count("] line ") + dropped == 300_000


async def asynchronous() -> None:
    pass


class Asynchronous:
    async def __call__(self) -> None:
        pass


def generating(count: int) -> Any:
    yield count


class StuckTerminal(io.StringIO):
    """Takes nothing until the job has finished."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def open_at_the_end(self, event: dict[str, Any]) -> None:
        if event["event"] == "job_finished":
            self.gate.set()

    def write(self, text: str) -> int:
        assert self.gate.wait(200)
        return super().write(text)


def test_env_reaches_the_workers_and_large_arguments_and_results_travel(run: Any) -> None:
    def read(data: bytes) -> tuple[str, bytes]:
        import os

        return os.environ["GREETING"], data

    data = bytes(range(256)) * 2**18  # 64 MiB
    assert run(read, data, min_np=1, max_np=1, env={"GREETING": "hello"}).results == [("hello", data)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be callable, not 3: give the function itself"),
        ({"fn": lambda: None, "args": (1,)}, TypeError, "fn cannot be called with the given args"),
        ({"fn": asynchronous}, TypeError, "fn is a coroutine function or a generator, .* may call asyncio.run"),
        ({"fn": functools.partial(generating, 1)}, TypeError, "fn is a coroutine function or a generator"),
        ({"fn": Asynchronous()}, TypeError, "fn is a coroutine function or a generator"),
        ({"fn": len, "args": ("",), "on_event": asynchronous}, TypeError, "on_event is a coroutine function"),
        ({"fn": lambda: None, "kwargs": [1]}, TypeError, "kwargs must be a dict of arguments for fn"),
        ({"min_np": 3, "max_np": 2}, ValueError, "min_np=3, max_np=2"),
        ({"min_np": 0}, ValueError, "min_np must be a whole number from 1 on, not 0"),
        ({"num_proc": 5, "min_np": 1, "max_np": 4}, ValueError, "num_proc=5, max_np=4"),
        ({"backend": "mpi"}, ValueError, "backend must be one of gloo, nccl or None, not 'mpi'"),
        ({"hang_timeout": -1}, ValueError, "hang_timeout must be a number of seconds above 0, not -1"),
        ({"bananas": 3}, TypeError, "unexpected keyword argument 'bananas'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    spark: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {"fn": training.plain, "args": (1,) if "fn" not in arguments else (), **arguments}
    with pytest.raises(error, match=message):
        spark_elastic.run(spark=spark, **call)


def test_a_function_that_cannot_be_pickled_is_named(spark: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="fn cannot be pickled, so it cannot travel to the workers"):
        spark_elastic.run(lambda: lock, spark=spark, min_np=1, max_np=1)


def test_two_runs_side_by_side_on_too_few_slots_take_turns(run_on_spark: Any) -> None:
    outcomes: dict[str, Any] = {}

    def one(name: str) -> None:
        outcomes[name] = run_on_spark(training.count_steps, 20, 0.02, min_np=3, max_np=3, yield_after=2.0)

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=250)
    assert set(outcomes) == {"a", "b"}
    for outcome in outcomes.values():
        check(outcome, 20)


@pytest.mark.parametrize("durable", [False, True], ids=["without a checkpoint", "with a checkpoint"])
def test_cancelling_the_spark_jobs_of_a_run_cancels_the_run(
    run_on_spark: Any, spark: Any, tmp_path: Path, durable: bool
) -> None:
    def cancel(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            spark.sparkContext.cancelAllJobs()

    checkpoint = str(tmp_path / "checkpoint") if durable else None
    with pytest.raises(JobCancelledError, match="its Spark jobs were cancelled") as failure:
        run_on_spark(
            training.train_until, str(tmp_path / "never"), min_np=2, max_np=2, on_event=cancel, checkpoint=checkpoint
        )
    kinds = [event["event"] for event in failure.value.events]  # type: ignore[attr-defined]
    assert kinds.count("world_formed") == 1


@pytest.mark.parametrize("by", ["group", "tag"])
def test_what_cancels_the_spark_jobs_of_the_calling_thread_cancels_its_run_within_seconds(
    run_on_spark: Any, spark: Any, by: str
) -> None:
    context, errors = spark.sparkContext, []
    formed = threading.Event()

    def train() -> None:
        if by == "group":
            context.setJobGroup("the user's", "a cell of a notebook", interruptOnCancel=True)
        else:
            context.addJobTag("the user's")
        try:
            run_on_spark(training.count_steps, 10**6, 0.02, min_np=2, max_np=2, on_event=watch)
        except JobCancelledError as error:
            errors.append(error)

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            formed.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert formed.wait(200)
    if by == "group":
        context.cancelJobGroup("the user's")
    else:
        context.cancelJobsWithTag("the user's")
    thread.join(20)
    goes_on = thread.is_alive()
    context.cancelAllJobs()  # otherwise the run would go on during the next tests
    assert not goes_on
    assert "its Spark jobs were cancelled" in str(errors[0])
    assert not context.statusTracker().getActiveJobsIds()


@pytest.fixture(scope="module")
def called_back(spark: Any) -> None:
    """Start the server by which Spark calls Python for a batch, which stays, before the test is asked what it leaves behind."""
    from pyspark.java_gateway import ensure_callback_server_started

    ensure_callback_server_started(spark.sparkContext._gateway)


@pytest.mark.usefixtures("called_back")
def test_a_streaming_query_that_stops_cancels_the_run_in_its_batch(
    run_on_spark: Any, spark: Any, tmp_path: Path
) -> None:
    errors: list[BaseException] = []
    formed = threading.Event()

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            formed.set()

    def train(batch: Any, number: int) -> None:
        try:
            run_on_spark(training.count_steps, 10**6, 0.02, min_np=2, max_np=2, on_event=watch)
        except JobCancelledError as error:
            errors.append(error)
            raise

    stream = spark.readStream.format("rate").load()
    query = stream.writeStream.foreachBatch(train).option("checkpointLocation", str(tmp_path)).start()
    assert formed.wait(200)
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    stopping.join(20)
    goes_on = stopping.is_alive()
    spark.sparkContext.cancelAllJobs()  # otherwise the run would go on during the next tests
    assert not goes_on, "the query waits for its batch"
    assert "its Spark jobs were cancelled" in str(errors[0])
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()


def test_a_stopped_run_leaves_within_seconds(spark: Any) -> None:
    """What Ctrl-C does: an exception in the waiting thread."""
    import ctypes

    problems: list[BaseException] = []
    formed = threading.Event()

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            formed.set()

    def call() -> None:
        try:
            spark_elastic.run(training.count_steps, (10**6, 0.02), spark=spark, min_np=1, max_np=2, on_event=watch)
        except KeyboardInterrupt as error:
            problems.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert formed.wait(200)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(problems) == 1


@pytest.mark.parametrize("elastic", [True, False])
def test_what_a_function_has_not_finished_when_it_returns_is_finished_before_its_result_arrives(
    elastic: bool, run: Any, tmp_path: Path
) -> None:
    class Kept(io.BytesIO):
        """Python closes such files at its end."""

    def leave_all(folder: str) -> Kept:
        import atexit
        from concurrent.futures import ThreadPoolExecutor

        def write(name: str) -> None:
            Path(folder, name).write_text("all")

        training.kept_open = open(Path(folder, "file"), "w")  # type: ignore[attr-defined]  # noqa: SIM115
        training.kept_open.write("all")  # type: ignore[attr-defined]
        atexit.register(write, "handler")
        goes_on = threading.Event()
        threading.Thread(target=lambda: (goes_on.wait(), write("thread"))).start()
        ThreadPoolExecutor(1).submit(goes_on.set)
        return Kept(b"result")  # as it is, and not as the end leaves it

    result = run(leave_all, str(tmp_path), num_proc=1, max_np=1, elastic=elastic)
    assert result.results[0].getvalue() == b"result"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("file", "handler", "thread"), "all"
    )


@pytest.mark.parametrize("elastic", [True, False])
def test_a_rank_that_has_more_to_finish_than_others_is_not_taken_for_a_hang(
    elastic: bool, run: Any, tmp_path: Path
) -> None:
    def upload(steps: int) -> int:
        training.count_steps(steps) if elastic else None
        if spark_elastic.rank() == 0:
            threading.Thread(target=time.sleep, args=(6.0,)).start()
        return spark_elastic.rank()

    result = run(upload, 2, min_np=2, max_np=2, num_proc=2, elastic=elastic, hang_timeout=2.0)
    assert result.results == [0, 1]
    assert not [event for event in result.events if event["event"] in ("worker_lost", "run_again")]


def test_what_a_function_has_written_before_it_raises_is_in_its_files(run: Any, tmp_path: Path) -> None:
    def fail() -> None:
        training.kept_open = open(tmp_path / "file", "w")  # type: ignore[attr-defined]  # noqa: SIM115
        training.kept_open.write("all")  # type: ignore[attr-defined]
        raise ValueError("after writing")

    with pytest.raises(TrainingFailedError, match="after writing"):
        run(fail, num_proc=1, max_np=1)
    assert (tmp_path / "file").read_text() == "all"
