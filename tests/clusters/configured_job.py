"""``spark-submit … configured_job.py FOLDER SIZE [NAME=JSON…]``: trains as ``job.py`` does, with so many workers.

What follows the size are further arguments of ``run``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cloudpickle
import job
from pyspark.sql import SparkSession

import spark_elastic as se


def main(folder: str, size: str, *settings: str) -> None:
    cloudpickle.register_pickle_by_value(job)
    spark = SparkSession.builder.getOrCreate()
    (Path(folder) / "workers").mkdir(exist_ok=True)
    given = {name: json.loads(value) for name, value in (setting.split("=", 1) for setting in settings)}
    results = se.run(
        job.train_fn, args=(folder,), spark=spark, event_log=f"{folder}/events.jsonl",
        **{"min_np": 1, "max_np": int(size), "elastic_timeout": 300.0, **given},
    )  # fmt: skip
    Path(folder, "result.json").write_text(json.dumps({"workers": results}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
