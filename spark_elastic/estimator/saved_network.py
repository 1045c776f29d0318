"""load_network: loads the network of a saved model in a process without Spark or Java."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping

import torch

from spark_elastic._text import shown
from spark_elastic.errors import CheckpointError, DamagedError
from spark_elastic.estimator.files import ArrowFiles, Files
from spark_elastic.estimator.saved_objects import FACTS, Metadata, load_objects, take_files


def load_network(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
) -> torch.nn.Module:
    """Return the network of a saved model, on the CPU and in evaluation mode. Needs neither Spark nor Java.

    path: the model's folder, a local path or a URL that fsspec or pyarrow opens, with ``storage_options``. A saved pipeline has
    its models in its folder ``stages``. Loading runs the saved code, and warns, so load only what you trust. Raises
    ``CheckpointError`` if the folder holds no model or one of a later format, and ``DamagedError``.
    """
    url = os.fspath(path).rstrip("/")
    files = ArrowFiles(url, storage_options)
    metadata = _metadata(files, url)
    if FACTS not in metadata or "layout" not in metadata[FACTS]:
        raise CheckpointError(
            f"{shown(url)} holds a {metadata.get('class')}, not a model of spark_elastic.estimator; those of a saved pipeline "
            "are in its folder stages"
        )
    written = take_files(url, metadata[FACTS])
    warnings.warn(f"loading {shown(url)} runs the code that is saved in it; load only what you trust", stacklevel=2)
    network = load_objects(files, url, written).get("model")
    if network is None:
        raise CheckpointError(f"{shown(url)} holds a model without a network")
    return network.eval()


def _metadata(files: Files, url: str) -> Metadata:
    """Read the line of JSON in the first non-empty file that Spark has written."""
    parts = [name for name in sorted(files.names(f"{url}/metadata")) if name.startswith("part-")]
    text = next((text for name in parts if (text := files.read(f"{url}/metadata/{name}").strip())), b"")
    if not text:
        raise CheckpointError(f"{shown(url)} holds no saved model: it has no metadata")
    try:
        metadata = json.loads(text)
    except ValueError as error:
        raise DamagedError(f"{shown(url)} is damaged: its metadata: {error}") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get(FACTS, {}), dict):
        raise DamagedError(f"{shown(url)} is damaged: its metadata are not those of a model")
    return metadata
