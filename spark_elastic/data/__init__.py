"""Loaders that give every row exactly once an epoch through any change of the world. Knows nothing of Spark.

Names are imported when they are first used, so that a map-style dataset needs no pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_elastic._lazy import lazily

if TYPE_CHECKING:
    from spark_elastic.data.elastic_dataloader import ElasticDataLoader
    from spark_elastic.data.loader import ElasticLoader
    from spark_elastic.data.manifest import Manifest, RowGroup, read_manifest
    from spark_elastic.data.parquet_loader import ParquetLoader
    from spark_elastic.data.pinning import set_pin
    from spark_elastic.data.tracker import RowGroupTracker

__all__ = [
    "ElasticDataLoader",
    "ElasticLoader",
    "Manifest",
    "ParquetLoader",
    "RowGroup",
    "RowGroupTracker",
    "read_manifest",
    "set_pin",
]

_HOMES = {
    "ElasticDataLoader": "elastic_dataloader",
    "ElasticLoader": "loader",
    "Manifest": "manifest",
    "ParquetLoader": "parquet_loader",
    "RowGroup": "manifest",
    "RowGroupTracker": "tracker",
    "read_manifest": "manifest",
    "set_pin": "pinning",
}

__getattr__ = lazily(__name__, _HOMES)
