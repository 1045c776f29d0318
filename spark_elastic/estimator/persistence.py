"""Saves and loads estimators and models: readable metadata, weights as safetensors, the rest by cloudpickle.

::

    metadata/            Spark ML's: class, uid, Params, and what training found out, as JSON
    weights.safetensors  every tensor of the network by the name that its state dict has for it
    code.pkl             the network without its tensors, and Params that are no JSON (functions, classes)

``code.pkl`` is code: loading it runs it. Reading the other two runs nothing.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tempfile
import warnings
from dataclasses import asdict
from typing import Any

import cloudpickle
import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from spark_elastic.estimator.hadoop import HadoopFiles
from spark_elastic.estimator.layout import Input, Layout

_WEIGHTS, _CODE = "weights.safetensors", "code.pkl"
_FACTS = "sparkElastic"


class EstimatorWriter(MLWriter):
    """Writes a Parameterized without any more state."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        plain, other = split_params(self.instance)
        DefaultParamsWriter.saveMetadata(self.instance, path, _context(self), self._facts(), plain)
        _save_objects(path, {"params": other, **self._objects()})

    def _facts(self) -> dict[str, Any]:
        return {}

    def _objects(self) -> dict[str, Any]:
        return {}


class ModelWriter(EstimatorWriter):
    """Writes a model, with its network, history and layout."""

    def _facts(self) -> dict[str, Any]:
        model = self.instance
        return {
            _FACTS: {
                "layout": asdict(model.layout),
                "shapes": model.shapes,
                "widths": model.widths,
                "history": model.history,
                "run_id": model.run_id,
                "label_metadata": model.label_metadata,
                "is_probability": model.is_probability,
            }
        }

    def _objects(self) -> dict[str, Any]:
        return {"model": self.instance.model}


class EstimatorReader(MLReader[Any]):
    """Reads what ``EstimatorWriter`` wrote."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, _context(self))
        found = metadata["class"]
        own = f"{self.cls.__module__}.{self.cls.__name__}"
        if found != own:
            raise ValueError(f"{path} holds a {found}, not a {own}; load it by that class")
        warnings.warn(f"loading {path} runs the code that is saved in it; load only what you trust", stacklevel=3)
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        objects = _load_objects(path)
        instance._set(**objects["params"])
        self._restore(instance, metadata, objects)
        return instance

    def _restore(self, instance: Any, metadata: dict[str, Any], objects: dict[str, Any]) -> None:
        pass


class ModelReader(EstimatorReader):
    """Reads what ``ModelWriter`` wrote."""

    def _restore(self, instance: Any, metadata: dict[str, Any], objects: dict[str, Any]) -> None:
        facts = metadata[_FACTS]
        layout = facts.pop("layout")
        inputs = tuple(Input(**{**entry, "columns": tuple(entry["columns"])}) for entry in layout["inputs"])
        shapes = {name: None if shape is None else tuple(shape) for name, shape in facts.pop("shapes").items()}
        layout = Layout(inputs, tuple(layout["labels"]), layout["weight"], tuple(layout.get("outputs", ())))
        instance.describe(model=objects["model"], layout=layout, shapes=shapes, **facts)


def split_params(instance: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part the Params that are set into those that JSON gives back as they are, and the others."""
    plain: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for entry, value in instance._paramMap.items():
        try:
            (plain if json.loads(json.dumps(value)) == value else other)[entry.name] = value
        except (TypeError, ValueError):
            other[entry.name] = value
    return plain, other


def _context(base: Any) -> Any:
    """What Spark's readers and writers of metadata take: a SparkContext before Spark 4, a session since."""
    session = base.sparkSession
    return session if int(session.version.split(".")[0]) >= 4 else session.sparkContext


# ---------------------------------------------------------------- files


def _save_objects(path: str, objects: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    files = HadoopFiles(path)
    tensors: dict[str, torch.Tensor] = {}
    code = io.BytesIO()
    _Pickler(code, tensors, _names(objects)).dump(objects)
    with tempfile.TemporaryDirectory(prefix="spark_elastic-") as folder:
        weights, pickled = os.path.join(folder, _WEIGHTS), os.path.join(folder, _CODE)
        save_file(tensors, weights)
        with open(pickled, "wb") as file:
            file.write(code.getvalue())
        for name, local in ((_WEIGHTS, weights), (_CODE, pickled)):
            files.upload(local, f"{path}/{name}")


def _load_objects(path: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = HadoopFiles(path)
    with tempfile.TemporaryDirectory(prefix="spark_elastic-") as folder:
        weights, pickled = os.path.join(folder, _WEIGHTS), os.path.join(folder, _CODE)
        files.download(f"{path}/{_WEIGHTS}", weights)
        files.download(f"{path}/{_CODE}", pickled)
        with open(pickled, "rb") as file:
            objects: dict[str, Any] = _Unpickler(file, load_file(weights)).load()
        return objects


def _names(objects: dict[str, Any]) -> dict[int, str]:
    """Names of a network's tensors, by identity; tied ones have one."""
    network = objects.get("model") or objects["params"].get("model")
    found: dict[int, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items() if network is not None else ():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), name)
    return found


class _Pickler(cloudpickle.Pickler):
    """Leaves tensors out of the pickle: they go to ``tensors`` under their names."""

    def __init__(self, file: Any, tensors: dict[str, torch.Tensor], names: dict[int, str]) -> None:
        super().__init__(file)
        self._tensors, self._names = tensors, names
        self._seen: list[Any] = []  # keeps identities from being used again

    def persistent_id(self, value: Any) -> Any:
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.is_leaf
        if not plain:
            return None
        self._seen.append(value)
        name = self._names.setdefault(id(value), f"tensor-{len(self._names)}")
        if name not in self._tensors:
            self._tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name, isinstance(value, torch.nn.Parameter), value.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, key: Any) -> Any:
        name, is_parameter, requires_grad = key
        if name not in self._made:
            tensor = self._tensors[name]
            self._made[name] = (
                torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            )
        return self._made[name]
