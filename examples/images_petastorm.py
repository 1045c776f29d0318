"""Images in Petastorm format: png files in a Parquet table, decoded while they are read.

A small network tells horizontal stripes from vertical ones. Writing the dataset needs petastorm (and so an environment of its
own, ``pip install 'spark-elastic[petastorm]'``); reading it does not: the default engine knows the format, ``pillow`` or
``opencv-python-headless`` decodes the images.

    spark-submit --master … examples/images_petastorm.py --data hdfs:///tmp/stripes --write
    spark-submit --master … examples/images_petastorm.py --data hdfs:///tmp/stripes
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pyspark.sql import SparkSession
from torch import nn

import spark_elastic as se

SIDE = 16


def stripes(index: int) -> tuple[np.ndarray, int]:
    """Return image ``index``, ``[SIDE, SIDE, 3]`` uint8, and whether its stripes are vertical."""
    random = np.random.default_rng(index)
    wave = 127 + 100 * np.sin(np.arange(SIDE) * random.uniform(0.8, 2.0) + random.uniform(0, 6))
    image = np.broadcast_to(wave[:, None, None], (SIDE, SIDE, 3)) + random.normal(0, 20, (SIDE, SIDE, 3))
    vertical = index % 2
    return (image.swapaxes(0, 1) if vertical else image).clip(0, 255).astype(np.uint8), vertical


def write_images(spark: SparkSession, url: str, count: int) -> None:
    """Materialize ``count`` images, encoded on the executors, as Petastorm's documentation has it."""
    from petastorm.codecs import CompressedImageCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql.types import IntegerType

    schema = Unischema(
        "Stripes",
        [
            UnischemaField("image", np.uint8, (SIDE, SIDE, 3), CompressedImageCodec("png"), False),
            UnischemaField("vertical", np.int32, (), ScalarCodec(IntegerType()), False),
        ],
    )

    def encode(index: int) -> Any:
        image, vertical = stripes(index)
        return dict_to_spark_row(schema, {"image": image, "vertical": vertical})

    with materialize_dataset(spark, url, schema, row_group_size_mb=1):
        rows = spark.sparkContext.parallelize(range(count), 4).map(encode)
        spark.createDataFrame(rows, schema.as_spark_schema()).write.mode("overwrite").parquet(url)


def train_fn(url: str, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(128, 1)
    )
    model = se.DistributedDataParallel(net.to(se.device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = se.data.ParquetLoader(url, global_batch_size=32, seed=0)  # engine="petastorm" takes petastorm's workers
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, images=0, right=0.0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while loader.epoch < epochs:
            for batch in loader:
                images = batch["image"].to(se.device()).permute(0, 3, 1, 2).float() / 255
                labels = batch["vertical"].to(se.device()).float()
                logits = model(images).squeeze(1)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.images += sum(loader.batch_rows)
                state.right = se.allreduce(((logits > 0) == labels.bool()).float().mean()).item()
                state.report(loss=loss, right=state.right)
                state.commit()
            loader.set_epoch(loader.epoch + 1)
            state.commit()

    train(state)
    return {"images": state.images, "right": state.right}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="URL of the dataset, which all machines reach")
    parser.add_argument("--write", action="store_true", help="write it first")
    parser.add_argument("--images", type=int, default=2000, help="how many are written")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    spark = SparkSession.builder.appName("images in Petastorm format").getOrCreate()
    if options.write:
        write_images(spark, options.data, options.images)
    results = se.run(
        train_fn,
        args=(options.data, options.epochs),
        spark=spark,
        min_np=1,
        num_proc=options.workers,
        max_np=options.workers,
    )
    print(f"{results[0]['images']:,} images trained, {results[0]['right']:.0%} of rank 0's last batch right")
    return results


if __name__ == "__main__":
    main()
