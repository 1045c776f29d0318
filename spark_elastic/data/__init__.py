"""Loaders that give every row exactly once an epoch through any change of the world. Knows nothing of Spark.

Names are imported when they are first used, so that a map-style dataset needs no pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_elastic._lazy import lazily

if TYPE_CHECKING:
    from spark_elastic.data.elastic_dataloader import ElasticDataLoader
    from spark_elastic.data.manifest import Manifest, RowGroup, read_manifest
    from spark_elastic.data.parquet_loader import ParquetLoader

__all__ = [
    "ElasticDataLoader",
    "Manifest",
    "ParquetLoader",
    "RowGroup",
    "read_manifest",
]

_HOMES = {
    "ElasticDataLoader": "elastic_dataloader",
    "Manifest": "manifest",
    "ParquetLoader": "parquet_loader",
    "RowGroup": "manifest",
    "read_manifest": "manifest",
}

__getattr__ = lazily(__name__, _HOMES)
