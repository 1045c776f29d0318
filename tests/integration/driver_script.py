"""A Spark driver of its own, for tests that end or stop it: ``driver_script.py MASTER FOLDER ACT…``."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import training

import spark_elastic
from spark_elastic.testing import hang, inject, kill, kill_executor


def main(master: str, folder: str, *acts: str) -> None:
    cloudpickle.register_pickle_by_value(training)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if acts == ("default session",):
        print(spark_elastic.run(training.plain, args=("x",), min_np=1, max_np=1))
        return
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    for act in acts:
        own = Path(folder, act)
        own.mkdir()
        if act == "killed":
            spark_elastic.run(training.die_quietly, args=(str(own),), spark=spark, min_np=2, max_np=2)
        elif act == "stopped":
            _stop_while_running(spark, own)
        elif act == "paused":
            results = spark_elastic.run(
                training.die_quietly, args=(str(own),), spark=spark, min_np=2, max_np=2, heartbeat_timeout=2.0
            )
            print("generations", set(results))
        elif act == "trained":
            fault = kill(rank=1, step=10) if master.startswith("local[") else kill_executor(rank=1, step=10)
            with inject(fault):
                results = spark_elastic.run(training.count_steps, args=(30, 0.02), spark=spark, min_np=2, max_np=2)
            assert all(result["counter"] == 30 for result in results), results
            assert len({result["digest"] for result in results}) == 1, results
            print("equal", len(results), flush=True)
        elif act == "checkpointed":
            arguments = (Path(folder, "dataset").read_text(), 1000, 2, {"global_batch_size": 64})
            with inject(hang(rank=1, step=10)):  # in the first epoch
                spark_elastic.run(
                    training.count_rows, args=arguments, spark=spark, min_np=2, max_np=2,
                    checkpoint=own / "saved", checkpoint_interval=0, event_log=own / "log",
                )  # fmt: skip


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
