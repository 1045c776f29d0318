"""Prediction on executors: a vectorised UDF around a network that each Python worker loads once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from pyspark.ml.functions import predict_batch_udf, vector_to_array
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DataType, DecimalType, DoubleType, StructType

from spark_elastic.estimator.frame import column, is_list, is_vector
from spark_elastic.estimator.layout import Layout, outputs_of

_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"

Finish = Callable[[list[np.ndarray]], dict[str, np.ndarray]]
"""Makes the output columns, [rows] or [rows, n] each, of what the network returned."""


class Scorer:
    """A network with its layout: calls it on numpy columns. Travels by cloudpickle."""

    def __init__(self, module: torch.nn.Module, layout: Layout, finish: Finish) -> None:
        self.module, self.layout, self.finish = module, layout, finish

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Predict a batch. columns: [rows] or [rows, …] arrays by name, or lists of arrays of different lengths."""
        batch = {name: _tensor(values) for name, values in columns.items()}
        self.module.eval()
        with torch.inference_mode():
            outputs = outputs_of(self.layout.call(self.module, batch), self.layout)
        return self.finish(
            [
                output.float().numpy(force=True) if output.is_floating_point() else output.numpy(force=True)
                for output in outputs
            ]
        )


class PredictionUdf:
    """Predictions as one column of Spark: a struct of the outputs.

    shapes: of one row of each feature; None for lists of different lengths, which go through a plain pandas UDF, as
    ``predict_batch_udf`` takes arrays of one shape only. The network is broadcast once.
    """

    def __init__(
        self,
        session: Any,
        scorer: Scorer,
        shapes: Mapping[str, tuple[int, ...] | None],
        kind: StructType,
        batch_size: int,
    ) -> None:
        self._shapes = {name: shapes.get(name) for name in scorer.layout.features}
        network = session.sparkContext.broadcast(cloudpickle.dumps(scorer))
        names = list(self._shapes)
        # Spark makes a column of numbers faster than a struct of one.
        self._only = kind.names[0] if len(kind.names) == 1 and None not in self._shapes.values() else None
        if None in self._shapes.values():
            self._udf = _ragged_udf(network, names, kind, batch_size)
        else:
            tensors = {place: list(shape) for place, (_, shape) in enumerate(self._shapes.items()) if shape}
            self._udf = predict_batch_udf(
                _maker(network, names, self._only),
                return_type=kind if self._only is None else kind[self._only].dataType,
                batch_size=batch_size,
                input_tensor_shapes=tensors or None,
            )

    def __call__(self, frame: DataFrame) -> Column:
        """The struct of predictions for a DataFrame that has the features."""
        found = self._udf(*(_as_input(frame, name) for name in self._shapes))
        return found if self._only is None else f.struct(found.alias(self._only))


def carry_vectors(frame: DataFrame) -> None:
    """Have Spark hand rows to the UDF where there are vectors.

    Spark 4.2 and 4.3 feed pandas UDFs in columnar form right behind a Parquet scan, and cannot carry a vector past them so.
    """
    conf = frame.sparkSession.conf
    if conf.get(_COLUMNAR, "true") == "true" and any(is_vector(field.dataType) for field in frame.schema):
        conf.set(_COLUMNAR, "false")


def _maker(network: Any, names: Sequence[str], only: str | None) -> Callable[[], Callable[..., Any]]:
    """What ``predict_batch_udf`` calls once in a Python worker. only: the one output, if it is not to be in a struct."""

    def make() -> Callable[..., Any]:
        scorer = cloudpickle.loads(network.value)

        def predict(*columns: np.ndarray) -> Any:
            found = scorer(dict(zip(names, columns, strict=True)))
            return found if only is None else found[only]

        # Spark counts the parameters to know that each column is an input of its own.
        positional = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(f"column_{place}", positional) for place in range(len(names))]
        predict.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return predict

    return make


def _ragged_udf(network: Any, names: Sequence[str], kind: StructType, batch_size: int) -> Callable[..., Column]:
    loaded: list[Any] = []

    def predict(batches: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd

        if not loaded:
            loaded.append(cloudpickle.loads(network.value))
        for batch in batches:
            series = batch if isinstance(batch, tuple) else (batch,)
            for start in range(0, len(series[0]), batch_size):
                part = {name: _values(one[start : start + batch_size]) for name, one in zip(names, series, strict=True)}
                found = loaded[0](part)
                yield pd.DataFrame(
                    {name: list(values) if values.ndim > 1 else values for name, values in found.items()}
                )

    if len(names) == 1:
        predict.__annotations__ = {"batches": Iterator["pd.Series"], "return": Iterator["pd.DataFrame"]}  # type: ignore[name-defined]  # noqa: F821
    udf: Callable[..., Column] = f.pandas_udf(predict, kind, f.PandasUDFType.SCALAR_ITER)
    return udf


def _values(series: Any) -> Any:
    return list(series) if series.dtype == object else series.to_numpy()


def _tensor(values: Any) -> torch.Tensor:
    if isinstance(values, list):
        return torch.nested.nested_tensor([torch.as_tensor(np.array(row)) for row in values], layout=torch.jagged)
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _as_input(frame: DataFrame, name: str) -> Column:
    kind = frame.schema[name].dataType
    if is_vector(kind):
        return vector_to_array(column(name), "float32")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType):
        return f.flatten(column(name))
    return column(name).cast(DoubleType()) if isinstance(kind, DecimalType) else column(name)


def check_features(frame: DataFrame, shapes: Mapping[str, Any], features: Sequence[str]) -> None:
    """Raise ValueError for a missing feature, and TypeError for one that is a number here and a list there."""
    for name in features:
        if name not in frame.columns:
            raise ValueError(f"there is no column {name!r}; the DataFrame has {', '.join(frame.columns)}")
        kind: DataType = frame.schema[name].dataType
        if is_list(kind) == (shapes.get(name) == ()):
            raise TypeError(
                f"column {name!r} is {kind.simpleString()}, and the model was trained on rows of shape {shapes.get(name)}"
            )
