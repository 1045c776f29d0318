"""A Spark driver whose jobs ask for GPUs that the session gives to no task: ``resources_script.py MASTER fixed|dynamic``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import training

import spark_elastic
from spark_elastic.launchers.resources import TaskResources, known_profile

DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
}


def main(master: str, allocation: str) -> None:
    cloudpickle.register_pickle_by_value(training)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark import TaskContext
    from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
    from pyspark.sql import SparkSession

    def of_user() -> ResourceProfile:
        return ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build

    early = of_user()  # before there is a session
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executor.cores", "1").config("spark.executor.memory", "512m")
    builder = builder.config("spark.executor.resource.gpu.amount", "1")
    spark = builder.config(map=DYNAMIC if allocation == "dynamic" else {}).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def train() -> list[str]:
        sizes = {"num_proc": 2} if allocation == "dynamic" else {"num_proc": 2, "max_np": 2}
        return sorted(spark_elastic.run(training.name_gpu, spark=spark, resources={"cpus": 1, "gpus": 1}, **sizes))

    def resources_of(rows: Iterator[Any]) -> list[str]:
        list(rows)
        context = TaskContext.get()
        assert context is not None
        return sorted(context.resources())

    first = train()
    print("; ".join(first))
    assert train() == first
    print("a plain Spark task has", spark.sparkContext.parallelize([0], 1).mapPartitions(resources_of).collect())
    print("profiles:", [number for number in range(4) if is_known(spark, number)])
    given = [known_profile(spark, TaskResources.of(profile)) for profile in (early, early, of_user(), of_user())]
    print("equal profiles of the user's:", len({profile.id for profile in given}))
    spark.stop()


def is_known(spark: Any, profile: int) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        spark.sparkContext._jsc.sc().resourceProfileManager().resourceProfileFromId(profile)
    except Py4JJavaError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
