"""An archive of Spark's classes, which the suite's JVMs start from; run as a script, this module makes it.

A test starts up to five JVMs, each of which loads some ten thousand classes and compiles what it soon throws away. From an
archive of loaded classes, and without the optimizing compiler, a small job on four executors takes a third of the CPU time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix, "spark.jsa")


def jvm_options() -> str:
    """Options for all JVMs of the suite, for ``JAVA_TOOL_OPTIONS``.

    A JVM that cannot use the archive (another release, other jars) says so on its standard output, which is read by programs:
    hence no log.
    """
    archive = f" -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else ""
    return f"-Xlog:disable -XX:TieredStopAtLevel=1 -XX:+UseSerialGC{archive}"


def make() -> None:
    """Write the archive again: what a session loads that reads, writes, and trains a small pipeline."""
    import pyspark

    fresh = ARCHIVE.with_suffix(".fresh")
    fresh.unlink(missing_ok=True)
    java = f"-XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit={fresh}"
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    subprocess.run(
        [
            submit,
            "--master",
            "local[2]",
            "--conf",
            "spark.log.level=ERROR",
            "--driver-java-options",
            java,
            __file__,
            "load",
        ],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        check=True,
    )
    fresh.replace(ARCHIVE)


def load() -> None:
    """Have the JVM load what tests use of Spark."""
    import tempfile

    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StringIndexer, VectorAssembler
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate() as spark, tempfile.TemporaryDirectory() as folder:
        rows = spark.range(100).selectExpr("double(id) AS x", "string(id % 7) AS word", "id % 2 AS y")
        rows.write.parquet(f"{folder}/rows")
        rows = spark.read.parquet(f"{folder}/rows")
        stages = [StringIndexer(inputCol="word", outputCol="index"), VectorAssembler(inputCols=["x"], outputCol="v")]
        model = Pipeline(stages=stages).fit(rows)
        model.write().overwrite().save(f"{folder}/model")
        scored = model.transform(rows).drop("v")
        scored.mapInArrow(lambda batches: batches, scored.schema).groupBy("y").avg("x").collect()
        spark.sparkContext.parallelize(range(4), 2).map(str).collect()


if __name__ == "__main__":
    load() if sys.argv[1:] == ["load"] else make()
