"""``spark-submit … configured_job.py FOLDER SIZE``: the training of ``job.py`` with so many workers, on executors that stay."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cloudpickle
import job
from pyspark.sql import SparkSession

import spark_elastic as se


def main(folder: str, size: str) -> None:
    cloudpickle.register_pickle_by_value(job)
    spark = SparkSession.builder.getOrCreate()
    (Path(folder) / "workers").mkdir(exist_ok=True)
    results = se.run(
        job.train_fn, args=(folder,), spark=spark, min_np=1, max_np=int(size), elastic_timeout=300.0,
        event_log=f"{folder}/events.jsonl",
    )  # fmt: skip
    Path(folder, "result.json").write_text(json.dumps({"workers": results}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
