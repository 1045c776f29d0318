"""Loaders that deliver every row exactly once per epoch, through any change of the world. Does not depend on Spark.

Names are imported on first use, so that a map-style dataset needs no pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from spark_elastic._lazy import lazily

if TYPE_CHECKING:
    from spark_elastic.data import predicates as predicates
    from spark_elastic.data import selectors as selectors
    from spark_elastic.data.elastic_dataloader import ElasticDataLoader as ElasticDataLoader
    from spark_elastic.data.manifest import Manifest as Manifest
    from spark_elastic.data.manifest import RowGroup as RowGroup
    from spark_elastic.data.manifest import read_manifest as read_manifest
    from spark_elastic.data.mixed_loader import WeightedSamplingLoader as WeightedSamplingLoader
    from spark_elastic.data.ngram import NGram as NGram
    from spark_elastic.data.parquet_loader import ParquetLoader as ParquetLoader

_HOMES = {
    "ElasticDataLoader": "elastic_dataloader",
    "Manifest": "manifest",
    "NGram": "ngram",
    "ParquetLoader": "parquet_loader",
    "RowGroup": "manifest",
    "WeightedSamplingLoader": "mixed_loader",
    "read_manifest": "manifest",
}

_MODULES = ("predicates", "selectors")
__all__ = sorted([*_HOMES, *_MODULES])

# Names that saved files and loaders of other libraries look up in this package, and that users do not need.
_ALSO = {"ElasticLoader": "loader", "RowGroupTracker": "tracker"}

_name = lazily(__name__, _HOMES | _ALSO)


def __getattr__(name: str) -> object:
    return importlib.import_module(f"{__name__}.{name}") if name in _MODULES else _name(name)
