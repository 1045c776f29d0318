"""Jobs in a session of Spark Connect: a real server, real executors, real kills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import networks
import pytest
from busy import busy
from connect_server import ConnectServer
from decommission import train_through_a_decommission
from other_processes import assert_gone
from pyspark.sql import functions as f
from training import count_steps, look_around, raise_everywhere, wait_for_a_file

import spark_elastic
from spark_elastic.errors import JobCancelledError, SparkElasticError, TrainingFailedError
from spark_elastic.testing import inject, kill, kill_executor

cloudpickle.register_pickle_by_value(networks)
EXECUTORS = 4
ROWS = 600


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


def test_the_worker_of_a_decommissioned_executor_leaves_ahead_of_it_and_costs_no_step(
    session: Any, tmp_path: Path
) -> None:
    train_through_a_decommission(session, tmp_path)


def test_a_job_may_ask_for_the_cores_of_its_tasks_and_for_gpus_where_executors_have_some(session: Any) -> None:
    results = spark_elastic.run(count_steps, args=(3,), spark=session, num_proc=2, resources={"cpus": 1})
    assert [result["counter"] for result in results] == [3.0, 3.0]
    with pytest.raises(ValueError, match=r"executors have none: set spark\.executor\.resource\.gpu\.amount"):
        spark_elastic.run(count_steps, args=(3,), spark=session, num_proc=2, resources={"gpus": 1})


def test_without_sizes_there_are_as_many_workers_as_the_cluster_has_cores(session: Any, tmp_path: Path) -> None:
    with busy(session, EXECUTORS, tmp_path / "busy"):
        pass  # now all executors are there, also one that replaces another
    assert len(spark_elastic.run(count_steps, args=(3,), spark=session)) == EXECUTORS


def test_a_job_that_was_interrupted_goes_on_from_its_checkpoint_and_grows_while_it_trains(
    session: Any, tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    interrupted: list[dict[str, Any]] = []
    end = tmp_path / "end"

    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint_written" and not interrupted:
            interrupted.append(event)
            threading.Thread(target=session.interruptAll).start()

    def watch(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "world_formed":
            (free if event["size"] == 1 else end).touch()

    job: dict[str, Any] = {"checkpoint": tmp_path / "saved", "checkpoint_interval": 0, "spark": session, "max_np": 2}
    with pytest.raises(JobCancelledError, match="interrupted"):
        spark_elastic.run(wait_for_a_file, args=(str(end),), on_event=interrupt, **job)
    with busy(session, EXECUTORS - 1, tmp_path / "busy") as free:
        results = spark_elastic.run(wait_for_a_file, args=(str(end),), on_event=watch, min_np=1, num_proc=1, **job)
    assert results == ["rank 0 of 2", "rank 1 of 2"]
    assert [event["size"] for event in events if event["event"] == "world_formed"] == [1, 2]
    (restored,) = (event for event in events if event["event"] == "checkpoint_restored")
    assert restored["values"]["step"] > 0


def test_slots_that_still_wait_for_a_core_are_taken_back_when_the_job_ends(session: Any) -> None:
    results = spark_elastic.run(
        count_steps, args=(50,), spark=session, min_np=2, num_proc=EXECUTORS, max_np=EXECUTORS + 2
    )
    assert len(results) == EXECUTORS
    # All cores are free again, and stay so.
    echoed = session.range(0, EXECUTORS, 1, EXECUTORS).mapInArrow(lambda batches: batches, "id long")
    assert echoed.count() == EXECUTORS


def test_the_next_job_of_a_session_finds_the_importers_of_the_last_one_until_shutdown(session: Any) -> None:
    first, second = (
        spark_elastic.run(look_around, spark=session, num_proc=EXECUTORS, max_np=EXECUTORS) for _ in range(2)
    )
    assert {parents[1] for parents, _ in first} == {parents[1] for parents, _ in second}
    assert [traces for _, traces in first + second] == [0] * 2 * EXECUTORS
    spark_elastic.shutdown()
    assert_gone([parents[1] for parents, _ in second])


def test_an_exception_of_the_users_ends_the_job_with_its_traceback(session: Any) -> None:
    with pytest.raises(TrainingFailedError, match="of the user's"):
        spark_elastic.run(raise_everywhere, args=("of the user's",), spark=session, num_proc=2, min_np=2, max_np=2)


def test_interrupting_all_queries_of_the_session_cancels_the_job(session: Any) -> None:
    with pytest.raises(JobCancelledError, match="interrupted"):
        spark_elastic.run(
            count_steps, args=(10**6, 0.02), spark=session, max_np=2, on_event=at_step(1, session.interruptAll)
        )


def test_interrupting_queries_by_a_tag_of_the_calling_thread_cancels_the_job(session: Any) -> None:
    session.addTag("the user's")
    with pytest.raises(JobCancelledError, match="interrupted"):
        spark_elastic.run(
            count_steps, args=(10**6, 0.02), spark=session, max_np=2,
            on_event=at_step(1, lambda: session.interruptTag("the user's")),
        )  # fmt: skip


def test_with_its_driver_in_a_slot_a_job_needs_nothing_but_the_session(session: Any, tmp_path: Path) -> None:
    formed: list[Any] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            formed.append(event["size"])
            (tmp_path / "formed").touch()

    job: dict[str, Any] = {"spark": session, "driver": "cluster", "num_proc": 2, "min_np": 1, "max_np": 2}
    with inject(kill(rank=1, step=2)):
        results = spark_elastic.run(wait_for_a_file, args=(str(tmp_path / "formed"),), on_event=note, **job)
    assert results[0] == f"rank 0 of {len(results)}"
    assert formed[0] == 2
    with pytest.raises(TrainingFailedError, match="of the user's"):
        spark_elastic.run(raise_everywhere, args=("of the user's",), **job)
    with pytest.raises(JobCancelledError, match="interrupted"):
        spark_elastic.run(count_steps, args=(10**6, 0.02), on_event=at_step(1, session.interruptAll), **job)


def test_a_script_without_a_session_trains_where_spark_remote_says(server: ConnectServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import spark_elastic as se\nprint(se.run(lambda: 'trained', num_proc=1))\n")
    told = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "SPARK_REMOTE": server.url},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "['trained']" in told.stdout, told.stderr


def test_stopping_the_session_cancels_the_job(server: ConnectServer) -> None:
    session = connect(server)
    with pytest.raises(JobCancelledError, match=r"session was (stopped|closed)"):
        spark_elastic.run(count_steps, args=(10**6, 0.02), spark=session, max_np=2, on_event=at_step(1, session.stop))
    # It may be on the way.
    with pytest.raises(SparkElasticError, match=r"has been stopped|no job can begin: .* session was (stopped|closed)"):
        spark_elastic.run(count_steps, args=(1, 0.0), spark=session, max_np=2)


@pytest.mark.parametrize("driver", ["client", "cluster"])
def test_the_death_of_the_server_cancels_the_job(driver: str, tmp_path: Path) -> None:
    script = """
import os
import sys
sys.path[:0] = [SUPPORT]
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import cloudpickle, training
from connect_server import ConnectServer
from pyspark.sql import SparkSession
import spark_elastic
cloudpickle.register_pickle_by_value(training)

server = ConnectServer(Path(sys.argv[1]), 4)
SparkSession.builder.remote(server.url).getOrCreate()
kill = lambda event: server.kill() if event["event"] == "world_formed" else None
job = {"args": (10**6, 0.02), "max_np": 2, "driver": sys.argv[2]}
# The session is found without being given, also by a thread that has made none.
run = ThreadPoolExecutor(1).submit(spark_elastic.run, training.count_steps, on_event=kill, **job)
print("cancelled:", run.exception(), flush=True)
try:
    spark_elastic.run(training.count_steps, **job)
except spark_elastic.SparkElasticError as error:
    print("then:", error, flush=True)
server.end()
os._exit(0)  # the client's own hooks at the end of Python try to reach a lost server for minutes
""".replace("SUPPORT", repr(str(Path(__file__).parents[1] / "support")))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), driver], capture_output=True, text=True, timeout=200, check=False
    )
    assert "cancelled: the job cannot go on in Spark: the Spark Connect server" in done.stdout, done.stderr
    assert re.search("then: no job can begin: the Spark Connect server .* is gone. Make another session", done.stdout)


def test_what_is_no_session_is_refused() -> None:
    with pytest.raises(TypeError, match="spark must be a SparkSession"):
        spark_elastic.run(count_steps, args=(1,), spark="sc://somewhere")  # type: ignore[arg-type]


# ---------------------------------------------------------------- estimators


@pytest.fixture
def frame(session: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Points above and below a line, in a process that pyspark takes for one of Spark Connect, whatever it did before."""
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    # A session that another thread has stopped stays this thread's active one, and pyspark.ml works with that.
    monkeypatch.setattr(type(session), "_default_session", session)
    monkeypatch.setattr(type(session)._active_session, "session", session, raising=False)
    places = [(float(number % 23) / 23, float(number % 29) / 29) for number in range(ROWS)]
    rows = [(a, b, float(a > b)) for a, b in places]
    # In one partition: one executor's Python imports torch to score it.
    return session.createDataFrame(rows, ["a", "b", "label"]).coalesce(1)


def classifier(store: Path | None, **params: Any) -> Any:
    from spark_elastic.estimator import TorchClassifier

    given = {"learningRate": 0.1, "globalBatchSize": 32, "epochs": 2, "seed": 7, "verbose": 0, "minNp": 1}
    given |= {"adaptiveNp": False, **params}
    network = {"modelFn": networks.dense, "modelParams": {"width": 2, "outputs": 2}}
    return TorchClassifier(**network, **given, store=None if store is None else str(store))


@pytest.mark.filterwarnings("ignore:loading")
def test_a_pipeline_is_fitted_through_a_loss_scores_and_is_saved_and_loaded(
    frame: Any, tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler

    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = classifier(tmp_path / "store", numProc=2, maxNp=2, validationFraction=0.2)
    pipeline = Pipeline(stages=[assembler, estimator])
    pipeline.save(f"{tmp_path}/pipeline")
    assert Pipeline.load(f"{tmp_path}/pipeline").getStages()[1].getStore() == estimator.getStore()

    with inject(kill(rank=1, step=5)):
        model = pipeline.fit(frame)
    history = model.stages[1].history
    assert history[0]["sizes"][0] == 2
    assert [event["event"] for event in events].count("fault_injected") == 1
    assert {entry["rows"] for entry in history} == {frame.count() - validation_rows(tmp_path)}
    assert history[-1]["val_loss"] < history[0]["val_loss"]

    scored = model.transform(frame)
    area = BinaryClassificationEvaluator().evaluate(scored)
    assert area > 0.95
    assert model.stages[1].evaluate(assembler.transform(frame))["areaUnderROC"] == pytest.approx(area)

    model.write().overwrite().save(f"{tmp_path}/model")
    model.write().overwrite().save(f"{tmp_path}/model")
    loaded = PipelineModel.load(f"{tmp_path}/model")
    assert loaded.stages[1].history == history
    assert loaded.transform(frame).select("probability").collect() == scored.select("probability").collect()
    classify = loaded.stages[1].udf("classify", frame.sparkSession)
    found = frame.select(classify(f.array("a", "b"))["prediction"].alias("prediction")).collect()
    assert found == scored.select("prediction").collect()


def validation_rows(folder: Path) -> int:
    marker = next((folder / "store" / "data").glob("*/*/_complete.json"))
    return int(json.loads(marker.read_text())["validation_rows"])


def test_a_grid_is_searched_with_fits_side_by_side(frame: Any, tmp_path: Path) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    estimator = classifier(tmp_path / "store", maxNp=1)
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.learningRate, [0.0001, 0.1]).build(),
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    found = search.fit(VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame))
    assert found.avgMetrics[1] > found.avgMetrics[0]
    assert found.bestModel.getLearningRate() == 0.1


def test_rows_are_written_once_and_those_of_another_frame_are_never_taken(
    session: Any, frame: Any, tmp_path: Path
) -> None:
    from spark_elastic.estimator.dataset import Split, Wanted, identity_of

    files = str(tmp_path / "rows")
    frame.write.parquet(files)
    frame.createOrReplaceTempView("rows")

    def named(frame: Any, *names: str) -> str:
        return identity_of(Wanted(frame, names or ("a", "b"), Split(), 4))

    by_view, by_files = session.table("rows"), session.read.parquet(files)
    identity = named(by_view)
    assert named(by_files.orderBy("b")) == identity
    assert named(by_files, "b", "a") != identity
    other = frame.selectExpr("a + 1 as a", "b")
    other.write.parquet(files, mode="overwrite")
    other.createOrReplaceTempView("rows")
    again = {named(session.table("rows")), named(session.read.parquet(files))}
    assert len(again) == 1
    assert identity not in again


def test_a_frame_of_many_columns_is_trained_on_and_scored(
    session: Any, frame: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of Spark Connect nest at most a hundred levels, and each look at a frame's schema makes a copy of it."""
    import torch

    from spark_elastic.estimator import TorchEstimator, TorchModel

    names = [f"c{number}" for number in range(120)]
    wide = frame.selectExpr("label", *(f"a + {number} AS {name}" for number, name in enumerate(names)))
    estimator = TorchEstimator(
        model=torch.nn.Linear(120, 1), loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD, learningRate=1e-9,
        featureCols=names, labelCols=["label"], batchSize=50, maxNp=1, store=str(tmp_path / "store"), verbose=0,
    )  # fmt: skip
    model = estimator.fit(wide)
    assert model.history[-1]["rows"] == ROWS
    listed = wide.selectExpr("*", "array(label, 1D) AS list", "array(1D, label) AS other")
    of_lists = TorchModel(model=networks.SumOfList(), featureCols=["list"], outputCols=["prediction"])
    reads, schema = [], type(wide).schema

    def read(frame: Any) -> Any:
        reads.append(frame)
        return schema.fget(frame)

    monkeypatch.setattr(type(wide), "schema", property(read))
    scored = [model.transform(wide), of_lists.transform(listed)]
    assert len(reads) < 20
    assert [each.where("prediction is null").count() for each in scored] == [0, 0]


def test_lists_of_different_lengths_are_scored_and_runs_go_on(session: Any, frame: Any, tmp_path: Path) -> None:
    import torch

    from spark_elastic.estimator import TorchEstimator

    frame = session.createDataFrame([([1.0] * (1 + number % 3), float(number % 3)) for number in range(60)], ["x", "y"])
    estimator = TorchEstimator(
        model=networks.SumOfList(), loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD, learningRate=0.1, featureCols=["x"],
        labelCols=["y"], batchSize=10, maxNp=1, runId="lengths", store=str(tmp_path / "store"), verbose=0,
    )  # fmt: skip
    assert [entry["epoch"] for entry in estimator.fit(frame).history] == [0]
    model = estimator.copy().setEpochs(2).fit(frame)
    assert [entry["epoch"] for entry in model.history] == [0, 1]
    assert model.transform(frame.coalesce(1)).where("prediction is null").count() == 0
    with pytest.raises(ValueError, match=r"'lengths' is another run .* differs in the data"):
        estimator.fit(frame.where("y > 0"))
    store = estimator.getStore()
    assert store.runs() == ["lengths"]
    store.delete("lengths")
    store.delete_data()
    assert not list((tmp_path / "store").glob("data/*"))


def test_places_that_server_and_client_do_not_share_are_named(
    frame: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.functions import array

    from spark_elastic.estimator import Store

    with pytest.raises(
        ValueError, match="a store that this process and the executors share is needed on local-cluster"
    ):
        classifier(None).fit(frame.withColumn("features", array("a", "b")))
    with pytest.raises(ValueError, match="is not shared: executors on"):
        Store.create("/nowhere")._check_shared(frame.sparkSession, "/nowhere/probe")
    monkeypatch.chdir(tmp_path)
    relative = f"saved-{uuid.uuid4()}"  # the server takes it for a folder of its own
    with pytest.raises(OSError, match=f"Spark has metadata in {relative} that this process does not see"):
        classifier(None).save(relative)
