"""A Spark driver of its own, for tests that end or stop it: ``driver_script.py MASTER FOLDER ACT…``."""

from __future__ import annotations

import base64
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import networks
import psutil
import pyspark
import shard_training
import training

import spark_elastic
from spark_elastic.driver import client_driver, cluster_driver
from spark_elastic.protocol.credentials import Credentials, create_credentials
from spark_elastic.testing import hang, inject, kill, kill_executor, kill_task

SECURED = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": "a secret of Spark's own",
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
    "spark.eventLog.enabled": "true",
}


def main(master: str, folder: str, *acts: str) -> None:
    for module in (networks, shard_training, training):
        cloudpickle.register_pickle_by_value(module)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if master.startswith("local["):
        # The first python3 on the path is another one, as for a user who has not activated the environment.
        del os.environ["PYSPARK_PYTHON"]
        Path(folder, "path").mkdir()
        _executable(Path(folder, "path", "python3"), "exit 1")
        os.environ["PATH"] = f"{folder}/path:{os.environ['PATH']}"
    if acts == ("default session",):
        ((parent, folder),) = spark_elastic.run(training.tell_place, min_np=1, max_np=1)
        print("ran below", parent, "in", folder, flush=True)
        signal.pause()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    if acts[0].startswith("secured"):
        Path(folder, "events").mkdir()
        builder = builder.config(map=SECURED).config("spark.eventLog.dir", Path(folder, "events").as_uri())
    if acts == ("excluded",):
        builder = builder.config("spark.excludeOnFailure.enabled", "true")
    if acts == ("no package",):
        # Without its site-packages an interpreter has pyspark, from Spark, and nothing else.
        bare = _executable(Path(folder, "bare-python"), f'exec {sys.executable} -S "$@"')
        os.environ["PYSPARK_PYTHON"] = bare
    if "gpu" in acts:
        found = _executable(Path(folder, "gpus"), """echo '{"name": "gpu", "addresses": ["7"]}'""")
        gpu = {f"spark.{who}.resource.gpu.amount": "1" for who in ("worker", "executor", "task")}
        builder = builder.config(map={**gpu, "spark.worker.resource.gpu.discoveryScript": found})
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("INFO" if acts[0].startswith("secured") else "OFF")
    for act in acts:
        own = Path(folder, act)
        own.mkdir()
        if act == "killed":
            spark_elastic.run(training.die_quietly, args=(str(own),), spark=spark, min_np=2, max_np=2)
        elif act == "kept":
            runs = [spark_elastic.run(training.look_around, spark=spark, num_proc=2, max_np=2) for _ in range(2)]
            first, second = ({parents[1] for parents, _ in results} for results in runs)
            assert first == second, runs
            assert [traces for results in runs for _, traces in results] == [0] * 4, runs
            one, other = (parents for parents, _ in runs[0])
            own.with_suffix(".part").write_text(" ".join(map(str, [*one[1:4], other[1]])))
            own.with_suffix(".part").rename(own / "importers")
            signal.pause()
        elif act == "shut down":
            _shut_down_beside_a_job(spark, own)
        elif act == "stopped":
            _stop_while_running(spark, own)
        elif act == "paused":
            results = spark_elastic.run(
                training.die_quietly, args=(str(own),), spark=spark, min_np=2, max_np=2, heartbeat_timeout=4.0
            )
            print("generations", set(results))
        elif act == "trained":
            fault = kill(rank=1, step=10) if master.startswith("local[") else kill_executor(rank=1, step=10)
            with inject(fault):
                results = spark_elastic.run(training.count_steps, args=(30, 0.02), spark=spark, min_np=2, max_np=2)
            assert all(result["counter"] == 30 for result in results), results
            assert len({result["digest"] for result in results}) == 1, results
            print("equal", len(results), flush=True)
        elif act == "no package":
            try:
                spark_elastic.run(training.plain, args=("x",), spark=spark, min_np=1, max_np=1)
            except spark_elastic.SparkElasticError as error:
                print(error, flush=True)
        elif act == "gpu":
            print(*spark_elastic.run(training.name_gpu, spark=spark, min_np=1, max_np=1), flush=True)
            asked = spark_elastic.run(training.name_gpu, spark=spark, num_proc=1, resources={"cpus": 1, "gpus": 1})
            print("asked for,", *asked, flush=True)
        elif act == "broken torch":
            Path(own, "torch.py").write_text("raise ImportError('libtorch.so is damaged')")
            spark.sparkContext.environment["PYTHONPATH"] = str(own)
            try:
                spark_elastic.run(training.plain, args=("x",), spark=spark, min_np=1, max_np=1)
            except spark_elastic.TrainingFailedError as error:
                print(error, flush=True)
        elif act == "excluded":
            _train_with_too_few_executors(spark)
        elif act.startswith("secured"):
            _look_for_the_key(spark, own, driver=act.split()[1])
        elif act == "fitting":
            with inject(hang(rank=1, step=18)):  # in the second epoch
                fit_counting(spark, own, numProc=2, maxNp=2)
        elif act == "on shards":
            with inject(kill(rank=0, step=4), hang(rank=1, step=10)):
                spark_elastic.run(
                    shard_training.train_on_shards, args=(16,), spark=spark, min_np=2, max_np=2, event_log=own / "log",
                    checkpoint=own / "saved", checkpoint_interval=0,
                )  # fmt: skip
        elif act == "checkpointed":
            arguments = (Path(folder, "dataset").read_text(), 1000, 2, {"global_batch_size": 64})
            with inject(hang(rank=1, step=10)):  # in the first epoch
                spark_elastic.run(
                    training.count_rows, args=arguments, spark=spark, min_np=2, max_np=2,
                    checkpoint=own / "saved", checkpoint_interval=0, event_log=own / "log",
                )  # fmt: skip


def _executable(path: Path, command: str) -> str:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return str(path)


def fit_counting(spark: Any, folder: Path, **params: Any) -> Any:
    """Fit two epochs of 600 rows that each count once, as a run that goes on where it was stopped."""
    estimator = networks.row_counter(
        600, epochs=2, store=str(folder / "store"), runId="counted", checkpointSteps=3,
        callbacks=networks.Marker(str(folder / "epochs")), **params,
    )  # fmt: skip
    return estimator.fit(spark.range(0, 600, 1, numPartitions=2))


def _train_with_too_few_executors(spark: Any) -> None:
    """Spark does not start a task that has failed on one of two executors there again, and the other is busy."""
    for least in (1, 2):
        try:
            with inject(kill_task(rank=1, step=10)):
                results = spark_elastic.run(
                    training.count_steps, args=(30, 0.02), spark=spark, min_np=least, max_np=2, num_proc=2,
                    elastic_timeout=5.0,
                )  # fmt: skip
            print("workers left", len(results), "steps", results[0]["counter"], flush=True)
        except spark_elastic.NotEnoughHostsError as error:
            print(error, flush=True)


def _look_for_the_key(spark: Any, folder: Path, driver: str) -> None:
    """Train with all logs on, and count the places in which the job's key or certificate can be read meanwhile."""
    logging.basicConfig(level=logging.DEBUG)
    fragments: list[bytes] = []

    def create(run_id: str) -> Credentials:
        credentials = create_credentials(run_id)
        fragments.extend(fragments_of(credentials.certificate) + fragments_of(credentials.private_key))
        return credentials

    def look(event: dict[str, Any]) -> None:
        if event["event"] != "world_formed":
            return
        processes = [Path("/proc") / str(pid) for pid in psutil.pids()]
        found = {kind: [read(process / kind) for process in processes] for kind in ("cmdline", "environ")}
        print("processes=", len(list(filter(None, found["environ"]))), sep="")
        for kind, contents in found.items():
            print(kind, sum(holds(content) for content in contents), sep="=")
        (folder / "looked").touch()

    def read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError:  # it has just ended
            return b""

    def holds(content: bytes) -> bool:
        return any(fragment in content for fragment in fragments)

    client_driver.create_credentials = cluster_driver.create_credentials = create
    results = spark_elastic.run(
        training.count_steps, args=(training.MANY_STEPS, 0.05), kwargs={"until": str(folder / "looked")}, spark=spark,
        min_np=2, max_np=2, on_event=look, event_log=folder / "log", driver=driver,
    )  # fmt: skip
    print("equal", len({result["digest"] for result in results}), "of", len(results))
    executors = Path(pyspark.__file__).parent / "work" / spark.sparkContext.applicationId
    spark.stop()
    logs = [
        path for place in (executors, folder.parent / "events", folder) for path in place.rglob("*") if path.is_file()
    ]
    print("logs=", len(logs), sep="")
    print("logs with the key=", sum(holds(read(path)) for path in logs), sep="")
    (folder / "fragments").write_text("\n".join(fragment.hex() for fragment in fragments))


def fragments_of(pem: bytes) -> list[bytes]:
    """What would give a PEM text away, as it is, encoded for the warm parent, and as what it encodes."""
    body = pem.splitlines()[1:-1]
    binary = base64.b64decode(b"".join(body))
    return [*(line[:40] for line in body), base64.b64encode(pem)[80:120], binary[40:72], binary[40:72].hex().encode()]


def _shut_down_beside_a_job(spark: Any, own: Path) -> None:
    """Call shutdown() while a job runs on some of the slots, then when none runs, and see which importers are left."""

    def importers_of(results: list[Any]) -> set[int]:
        return {above[1] for above, _ in results}

    def alive(pids: set[int]) -> set[int]:
        return {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}

    spark_elastic.shutdown()  # nothing has run yet
    left = importers_of(spark_elastic.run(training.look_around, spark=spark, num_proc=4, max_np=4))
    assert alive(left) == left
    shut, done, started, lost = [], own / "shut", [], []

    def shut_down() -> None:
        spark_elastic.shutdown()
        shut.append(alive(left))
        done.touch()

    def watch(event: dict[str, Any]) -> None:
        (started if event["event"] == "worker_started" else lost if "lost" in event["event"] else []).append(event)
        if event["event"] == "worker_started" and len(started) == 2:
            threading.Thread(target=shut_down).start()

    results = spark_elastic.run(
        training.look_around_when_there_is, args=(str(done),), spark=spark, num_proc=2, max_np=2, on_event=watch
    )
    assert shut == [importers_of(results)], (left, shut, results)
    assert lost == [], lost
    spark_elastic.shutdown()
    assert alive(left) == set()
    spark.stop()
    spark_elastic.shutdown()
    print("shut down", flush=True)


def _stop_while_running(spark: Any, folder: Path) -> None:
    def stop() -> None:
        while not (folder / "0").exists():
            time.sleep(0.05)
        started.append(time.monotonic())
        spark.stop()

    started: list[float] = []
    threading.Thread(target=stop).start()
    try:
        spark_elastic.run(training.die_quietly, args=(str(folder),), spark=spark, min_np=2, max_np=2)
    except spark_elastic.JobCancelledError as error:
        print(f"{error} after {time.monotonic() - started[0]:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
