"""Jobs in a session of Spark Connect: a real server, real executors, real kills."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connect_server import ConnectServer
from training import count_steps, raise_everywhere

import spark_elastic
from spark_elastic.errors import JobCancelledError, TrainingFailedError
from spark_elastic.testing import inject, kill, kill_executor

EXECUTORS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    server = ConnectServer(tmp_path_factory.mktemp("connect"), EXECUTORS)
    yield server
    server.end()


@pytest.fixture
def session(server: ConnectServer) -> Iterator[Any]:
    session = connect(server)
    yield session
    session.stop()


def connect(server: ConnectServer) -> Any:
    """A session of its own, beside whatever classic session this process has."""
    from pyspark.sql.connect.session import SparkSession

    return SparkSession.builder.remote(f"{server.url}/;session_id={uuid.uuid4()}").create()


def at_step(number: int, act: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    """What to give as ``on_event``: calls ``act`` once, when a world has formed for the ``number``-th time."""
    formed: list[Any] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            formed.append(event)
            if len(formed) == number:
                threading.Thread(target=act).start()

    return note


def test_a_killed_worker_and_a_killed_executor_cost_no_committed_step(session: Any) -> None:
    with inject(kill(rank=1, step=10), kill_executor(rank=1, step=40)):
        results = spark_elastic.run(count_steps, args=(200, 0.02), spark=session, min_np=2, num_proc=3, max_np=3)
    assert [result["counter"] for result in results] == [200.0] * len(results)
    assert all(result["history"] == list(range(1, 201)) for result in results)
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["generation"] >= 3


def test_without_sizes_there_are_as_many_workers_as_the_cluster_has_cores(session: Any) -> None:
    session.range(0, EXECUTORS, 1, EXECUTORS).mapInArrow(lambda batches: batches, "id long").count()  # all are up
    assert len(spark_elastic.run(count_steps, args=(3,), spark=session)) == EXECUTORS


def test_slots_that_still_wait_for_a_core_are_taken_back_when_the_job_ends(session: Any) -> None:
    results = spark_elastic.run(
        count_steps, args=(50,), spark=session, min_np=2, num_proc=EXECUTORS, max_np=EXECUTORS + 2
    )
    assert len(results) == EXECUTORS
    # All cores are free again, and stay so.
    echoed = session.range(0, EXECUTORS, 1, EXECUTORS).mapInArrow(lambda batches: batches, "id long")
    assert echoed.count() == EXECUTORS


def test_an_exception_of_the_users_ends_the_job_with_its_traceback(session: Any) -> None:
    with pytest.raises(TrainingFailedError, match="of the user's"):
        spark_elastic.run(raise_everywhere, args=("of the user's",), spark=session, num_proc=2, min_np=2, max_np=2)


def test_interrupting_all_queries_of_the_session_cancels_the_job(session: Any) -> None:
    with pytest.raises(JobCancelledError, match="interrupted"):
        spark_elastic.run(
            count_steps, args=(10**6, 0.02), spark=session, max_np=2, on_event=at_step(1, session.interruptAll)
        )


def test_stopping_the_session_cancels_the_job(server: ConnectServer) -> None:
    session = connect(server)
    with pytest.raises(JobCancelledError, match=r"session was (stopped|closed)"):
        spark_elastic.run(count_steps, args=(10**6, 0.02), spark=session, max_np=2, on_event=at_step(1, session.stop))


def test_the_death_of_the_server_cancels_the_job(tmp_path: Path) -> None:
    script = """
import os
import sys
sys.path[:0] = [SUPPORT]
from pathlib import Path
import cloudpickle, training
from connect_server import ConnectServer
from pyspark.sql import SparkSession
import spark_elastic
cloudpickle.register_pickle_by_value(training)

server = ConnectServer(Path(sys.argv[1]), 2)
SparkSession.builder.remote(server.url).getOrCreate()
try:
    kill = lambda event: server.kill() if event["event"] == "world_formed" else None
    # Found without being given, as it is active.
    spark_elastic.run(training.count_steps, args=(10**6, 0.02), max_np=2, on_event=kill)
except spark_elastic.JobCancelledError as error:
    print("cancelled:", error, flush=True)
    server.end()
    os._exit(0)  # the client's own hooks at the end of Python try to reach a lost server for minutes
""".replace("SUPPORT", repr(str(Path(__file__).parents[1] / "support")))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert "cancelled: the job cannot go on in Spark: the Spark Connect server" in done.stdout, done.stderr


def test_what_is_no_session_is_refused() -> None:
    with pytest.raises(TypeError, match="spark must be a SparkSession"):
        spark_elastic.run(count_steps, args=(1,), spark="sc://somewhere")  # type: ignore[arg-type]


def test_estimators_say_that_they_need_a_classic_session(session: Any) -> None:
    import torch

    from spark_elastic.estimator import TorchEstimator

    estimator = TorchEstimator(
        model=torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=torch.nn.MSELoss(),
        featureCols=["x"],
        labelCols=["y"],
        outputCols=["prediction"],
    )
    with pytest.raises(TypeError, match="estimators do not work with Spark Connect yet"):
        estimator.fit(session.createDataFrame([(0.0, 1.0)], ["x", "y"]))
