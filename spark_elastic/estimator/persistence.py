"""Saves and loads estimators and models: readable metadata, weights as safetensors, everything else by cloudpickle.

::

    metadata/            Spark ML's metadata as JSON: class, uid, Params, and facts found out in training
    weights.safetensors  every tensor of the network, by its name in the state dict
    code.pkl             the network without its tensors, and Params that JSON cannot represent (functions, classes)

``code.pkl`` is code, which runs when it is loaded. Reading the other two runs nothing. docs/formats.md describes all three.
Files that earlier releases saved can still be read.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from pyspark.ml.param import Params
from pyspark.ml.util import BaseReadWrite, DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from spark_elastic import _saved_names
from spark_elastic._json import Json
from spark_elastic._text import shown
from spark_elastic.errors import DamagedError
from spark_elastic.estimator.files import Files
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.params import FitParams, Parameterized
from spark_elastic.estimator.saved_objects import (
    FACTS,
    FORMAT,
    Metadata,
    SavedObjects,
    load_objects,
    take_files,
    versions,
    write_objects,
)
from spark_elastic.estimator.sessions import open_files
from spark_elastic.launchers.java import starting_spark

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from spark_elastic.estimator.estimator import ElasticEstimator
    from spark_elastic.estimator.model import ElasticModel

P = TypeVar("P", "ElasticEstimator", "ElasticModel")


class EstimatorWriter(MLWriter):
    """Writes a Parameterized that has no state besides its Params."""

    def __init__(self, instance: Parameterized) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str | os.PathLike[str]) -> None:
        """Write metadata, Params, tensors and all other objects into the folder."""
        path = os.fspath(path)
        plain, other = self._params()
        with tempfile.TemporaryDirectory(prefix="spark_elastic-") as folder:
            written = write_objects(folder, {"params": other, **self._objects()})
            facts = {FACTS: {"format": FORMAT, "versions": versions(), "files": written, **self._facts()}}
            DefaultParamsWriter.saveMetadata(self.instance, path, _context(self), facts, plain)
            files = _files_beside_metadata(path)
            for name in written:
                files.upload(os.path.join(folder, name), f"{path}/{name}")

    def _handleOverwrite(self, path: str | os.PathLike[str]) -> None:
        open_files(os.fspath(path)).delete(os.fspath(path))

    def _params(self) -> tuple[dict[str, Json], dict[str, object]]:
        return split_params(self.instance)

    def _facts(self) -> dict[str, Json]:
        return {}

    def _objects(self) -> SavedObjects:
        return {}


class ModelWriter(EstimatorWriter):
    """Writes a model with its network, history and layout.

    Functions and classes from its training are left out, because loading a model must not require their modules.
    """

    instance: ElasticModel

    def _params(self) -> tuple[dict[str, Json], dict[str, object]]:
        plain, other = split_params(self.instance)
        return plain, {name: value for name, value in other.items() if not hasattr(FitParams, name)}

    def _facts(self) -> dict[str, Json]:
        model = self.instance
        return {
            "layout": asdict(model.layout),
            "shapes": model.shapes,
            "widths": model.widths,
            "history": model.history,
            "run_id": model.run_id,
            "label_metadata": model.label_metadata,
            "is_probability": model.is_probability,
        }

    def _objects(self) -> SavedObjects:
        return {"model": self.instance.model}


class EstimatorReader(MLReader[P]):
    """Reads what ``EstimatorWriter`` wrote."""

    def __init__(self, cls: type[P]) -> None:
        super().__init__()
        self.cls: type[P] = cls

    def load(self, path: str | os.PathLike[str]) -> P:
        """Read an instance from a folder. Raises ``DamagedError``, or ``ValueError`` if it holds another class."""
        path = os.fspath(path)
        metadata = _read_metadata(path, _context(self))
        found, own = _class_name(metadata["class"]), f"{self.cls.__module__}.{self.cls.__name__}"
        if found != own:
            raise ValueError(f"{shown(path)} holds a {found}, not a {own}; load it by that class")
        facts = metadata.get(FACTS, {})
        written = take_files(path, facts)
        warnings.warn(
            f"loading {shown(path)} runs the code that is saved in it; load only what you trust", stacklevel=3
        )
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        objects = load_objects(_files_beside_metadata(path), path, written)
        try:
            instance._set(**objects["params"])
            self._restore(instance, facts, objects)
        except (LookupError, TypeError, AttributeError) as error:
            raise DamagedError(f"{shown(path)} is damaged: its metadata: {type(error).__name__}: {error}") from error
        return instance

    def _restore(self, instance: P, facts: Metadata, objects: SavedObjects) -> None:
        pass


class ModelReader(EstimatorReader["ElasticModel"]):
    """Reads what ``ModelWriter`` wrote."""

    def _restore(self, instance: ElasticModel, facts: Metadata, objects: SavedObjects) -> None:
        layout = facts.pop("layout")
        inputs = tuple(Input(**{**entry, "columns": tuple(entry["columns"])}) for entry in layout["inputs"])
        shapes = {name: None if shape is None else tuple(shape) for name, shape in facts.pop("shapes").items()}
        layout = Layout(inputs, tuple(layout["labels"]), layout["weight"], tuple(layout.get("outputs", ())))
        instance.describe(model=objects["model"], layout=layout, shapes=shapes, **facts)


def split_params(instance: Params) -> tuple[dict[str, Json], dict[str, object]]:
    """Divide the Params that are set into those that JSON preserves exactly and all others."""
    plain: dict[str, Json] = {}
    other: dict[str, object] = {}
    for entry, value in instance._paramMap.items():
        try:
            is_plain = bool(json.loads(json.dumps(value)) == value)
        except (TypeError, ValueError):
            is_plain = False
        if is_plain:
            plain[entry.name] = value
        else:
            other[entry.name] = value
    return plain, other


def _files_beside_metadata(path: str) -> Files:
    """Open the folder whose metadata Spark writes and reads. Raises OSError if this process sees a different folder."""
    files = open_files(path)
    if not files.exists(f"{path}/metadata"):
        raise OSError(
            f"Spark has metadata in {shown(path)} that this process does not see: choose a place that both reach "
            "under the same name"
        )
    return files


def _context(base: BaseReadWrite) -> SparkContext | SparkSession:
    """Return what Spark's metadata readers and writers take: a SparkContext before Spark 4, a session from then on."""
    with starting_spark():
        session = base.sparkSession  # creates a session if there is none
    return session if int(session.version.split(".")[0]) >= 4 else session.sparkContext


def _class_name(saved: str) -> str:
    """Return the present name of a class that any release has saved."""
    module, _, name = saved.rpartition(".")
    return f"{_saved_names.home_of(module, name)}.{name}"


def _read_metadata(path: str, context: SparkContext | SparkSession) -> Metadata:
    try:
        metadata: Metadata = DefaultParamsReader.loadMetadata(path, context)
        return {"class": str(metadata["class"]), **metadata}
    except (ValueError, TypeError, LookupError) as error:
        raise DamagedError(f"{shown(path)} is damaged: its metadata: {error}") from error
    except Exception as error:
        if "ChecksumException" in str(error):
            raise DamagedError(f"{shown(path)} is damaged: its metadata are not what was written") from error
        raise
