"""The Spark that benchmarks run on: a local-cluster of real executor JVMs, all of them up."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def local_cluster(executors: int) -> Iterator[Any]:
    """A session with so many executors of one core, each with a Python worker that has run."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local-cluster[{executors},1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    spark.sparkContext.parallelize(range(executors), executors).barrier().mapPartitions(list).collect()
    yield spark
    spark.stop()
