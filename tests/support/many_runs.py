"""What many runs in one session leave behind: ``many_runs.py [--runs 50]``.

Prints, after each run, what the driver's Python process holds, and the processes of Spark's Python tasks, which Spark uses again.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle
import psutil
import training

import spark_elastic

MIB = 2**20


@dataclass(frozen=True)
class Held:
    driver_bytes: int
    driver_descriptors: int
    driver_threads: int
    task_bytes: int
    task_descriptors: int

    def __str__(self) -> str:
        return (
            f"driver {self.driver_bytes / MIB:.1f} MiB, {self.driver_descriptors} descriptors, {self.driver_threads} threads; "
            f"largest task {self.task_bytes / MIB:.1f} MiB, {self.task_descriptors} descriptors"
        )


def run_once(spark: Any) -> Held:
    """Train a few steps on two executors; return what is held afterwards."""
    spark_elastic.run(training.count_steps, args=(3,), spark=spark, min_np=2, max_np=2)
    return measure()


def measure() -> Held:
    """Return what is held now."""
    gc.collect()
    me = psutil.Process()
    tasks = [held for process in me.children(recursive=True) if (held := _held_by_task(process)) is not None]
    task_bytes, task_descriptors = zip(*tasks, strict=True) if tasks else ((0,), (0,))  # Spark may have ended them all
    return Held(me.memory_info().rss, me.num_fds(), me.num_threads(), max(task_bytes), max(task_descriptors))


def _held_by_task(process: psutil.Process) -> tuple[int, int] | None:
    """Bytes and descriptors of a process of Spark's Python tasks; None for any other, also for one that ends just now.

    Such a process is forked by ``pyspark.daemon``, and has its command line.
    """
    try:
        parent = process.parent()
        if parent is not None and all("pyspark.daemon" in " ".join(each.cmdline()) for each in (process, parent)):
            return process.memory_info().rss, process.num_fds()
    except psutil.Error:
        pass
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    given = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    cloudpickle.register_pickle_by_value(training)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    for number in range(1, given.runs + 1):
        held = run_once(spark)
        if number in (1, 2, 5) or number % 10 == 0:
            print(f"after {number:3} runs: {held}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
