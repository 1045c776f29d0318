"""Makes the kept files of ``tests/kept/format-N``, with the release whose files are to be read for ever.

    PYTHONPATH=tests/support python tests/kept/make.py tests/kept/format-1

What is there is never made again: a later release reads what an earlier one wrote. Of format 3 there are checkpoints only.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import kept_state
import torch

from spark_elastic.checkpoint.content import encode, encode_joined
from spark_elastic.checkpoint.directory import VERSION_OF_PARTS, CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.checkpoint.parts import Part, Written, encode_part, join
from spark_elastic.checkpoint.tensors import file_pieces
from spark_elastic.worker.state.snapshot import TensorBuffer


def checkpoint(folder: Path) -> None:
    state = kept_state.trained()
    state.save()
    directory = CheckpointDirectory(str(folder))
    directory.write(CheckpointName(directory.claim(), 2, 3), encode(state._keeper.current))


def checkpoint_of_parts(folder: Path, size: int = 3) -> None:
    """Write the checkpoint as ``size`` ranks do together."""
    state = kept_state.trained()
    state.save()
    directory = CheckpointDirectory(str(folder))
    name, kept = CheckpointName(directory.claim(), 2, 3), state._keeper.current
    entries, encoded = {}, []
    for rank in range(size):
        views = [view if number % size == rank else view.to("meta") for number, view in enumerate(kept.buffer.views)]
        part = Part(rank, size, kept.skeleton, TensorBuffer(specs=kept.buffer.specs, views=views))
        encoded.append(encode_part(part))
        entries[part.file] = directory.write_file(name, part.file, file_pieces(encoded[-1].tensors))
    written = [Written(file, str(name), entries[file], tuple(encoded[n].tensors)) for n, file in enumerate(entries)]
    join(encoded[0], written[1:], str(name))
    for file, pieces in encode_joined(encoded[0], kept.skeleton).items():
        entries[file] = directory.write_file(name, file, pieces)
    directory.complete(name, entries, VERSION_OF_PARTS)


def estimators(folder: Path) -> None:
    """Fit in executors, save what Spark ML saves, and keep the run's own checkpoint."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    from spark_elastic.estimator import BestModel, EarlyStopping, Store, TorchClassifier, TorchEstimator

    session = SparkSession.builder.master("local-cluster[1,1,1024]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    frame = session.range(64, numPartitions=1).select(f.rand(1).alias("a"), f.rand(2).alias("b"))
    frame = frame.withColumn("label", (f.col("a") > f.col("b")).cast("double"))
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    common: dict[str, Any] = {"batchSize": 16, "epochs": 2, "minNp": 1, "maxNp": 1, "verbose": 0, "seed": 3}
    with tempfile.TemporaryDirectory() as place:
        estimator = TorchEstimator(
            model=torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)),
            optimizer=torch.optim.Adam, optimizerParams={"lr": 0.01}, loss=torch.nn.BCEWithLogitsLoss(),
            featureCols=["features"], labelCols=["label"], outputCols=["score"], runId="kept",
            store=Store.create(place), callbacks=[EarlyStopping(patience=5), BestModel()], **common,
        )  # fmt: skip
        model = estimator.fit(frame)
        shutil.copytree(Path(place, "runs"), folder / "runs")
        estimator.set(estimator.store, Store.create("file:///data/store"))
        estimator.write().save(f"file://{folder}/estimator")
        model.write().save(f"file://{folder}/model")
        model.transform(frame.limit(4)).select("a", "b", "score").coalesce(1).toPandas().to_json(
            folder / "scores.json", orient="records", double_precision=15
        )
    classifier = TorchClassifier(model=torch.nn.Linear(2, 2), labelCol="label", **common)
    Pipeline(stages=[classifier]).write().save(f"file://{folder}/pipeline")
    Pipeline(stages=[classifier]).fit(frame).write().save(f"file://{folder}/fitted")
    session.stop()


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True)
    checkpoint(target / "checkpoint")
    checkpoint_of_parts(target / "checkpoint-of-parts")
    estimators(target)
