"""Sizes that a job takes from a cluster when none are given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from standalone import Standalone

SCRIPT = """
import sys, time
from pyspark.sql import SparkSession
from spark_elastic.launchers.session import default_sizes

builder = SparkSession.builder.master(sys.argv[1]).config("spark.default.parallelism", 200)
with builder.config("spark.ui.enabled", "false").getOrCreate() as spark:
    backend = spark.sparkContext._jsc.sc().schedulerBackend()
    while backend.totalCoreCount() < 3:
        time.sleep(0.1)
    print(default_sizes(spark, None, None, None))
"""


@pytest.fixture
def cluster(nothing_left: None, tmp_path: Path) -> Iterator[Standalone]:
    made = Standalone(tmp_path)
    for _ in range(3):
        made.add_worker()
    yield made
    made.end()


def test_a_default_parallelism_that_somebody_has_set_does_not_hide_how_many_cores_there_are(
    cluster: Standalone,
) -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT, cluster.url], capture_output=True, text=True, timeout=120)
    assert said.stdout == "(3, 3, 3)\n", said.stderr[-2000:]
