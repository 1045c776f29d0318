"""A Spark driver of its own, for tests that end or stop it: ``driver_script.py MODE MASTER FOLDER``."""

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
from spark_elastic.testing import inject, kill, kill_executor


def main(mode: str, master: str, folder: str) -> None:
    from pyspark.sql import SparkSession

    cloudpickle.register_pickle_by_value(training)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    if mode == "killed":
        spark_elastic.run(training.die_quietly, args=(folder, 10**6), spark=spark, min_np=2, max_np=2)
    elif mode == "stopped":
        _stop_while_running(spark, folder)
    elif mode == "trained":
        fault = kill(rank=1, step=10) if master.startswith("local[") else kill_executor(rank=1, step=10)
        with inject(fault):
            results = spark_elastic.run(training.count_steps, args=(60, 0.02), spark=spark, min_np=2, max_np=2)
        assert all(result["counter"] == 60 for result in results), results
        assert len({result["digest"] for result in results}) == 1, results
        print("equal", len(results))
    elif mode == "paused":
        results = spark_elastic.run(
            training.count_steps, args=(200, 0.05), spark=spark, min_np=2, max_np=2, heartbeat_timeout=4.0
        )
        print("generations", {result["generation"] for result in results})
    elif mode == "default session":
        spark.stop()
        print(spark_elastic.run(training.plain, args=("x",), min_np=1, max_np=1))


def _stop_while_running(spark: Any, folder: str) -> None:
    def stop() -> None:
        while not Path(folder, "0").exists():
            time.sleep(0.05)
        started.append(time.monotonic())
        spark.stop()

    started: list[float] = []
    threading.Thread(target=stop).start()
    try:
        spark_elastic.run(training.die_quietly, args=(folder, 10**6), spark=spark, min_np=2, max_np=2)
    except spark_elastic.JobCancelledError as error:
        print(f"{error} after {time.monotonic() - started[0]:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
