"""Prediction on executors, by a vectorized UDF with a network that each Python worker loads once."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import numpy as np
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import PandasUDFType, pandas_udf
from pyspark.sql.types import ArrayType, DataType, DecimalType, DoubleType, StructType

from spark_elastic.estimator.finite import SHOWN, check_finite
from spark_elastic.estimator.frame import as_list, check_columns, column, is_list, shown_columns
from spark_elastic.estimator.layout import Layout, in_order, outputs_of
from spark_elastic.estimator.row_checks import check_indexes, check_whole
from spark_elastic.estimator.row_numbers import RowCount
from spark_elastic.estimator.scoring_device import scoring_device
from spark_elastic.estimator.sql_arguments import features_of

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

# Makes the output columns, each [rows] or [rows, n], from the network's outputs, each [rows, …].
Finish = Callable[[list[np.ndarray]], dict[str, np.ndarray]]
# The result of a prediction for Spark: the arrays of a struct's fields, or a single array.
Predicted = dict[str, np.ndarray] | np.ndarray


def as_rows(output: np.ndarray) -> np.ndarray:
    """Return an output [rows, …] as [rows, numbers]."""
    return output.reshape(len(output), math.prod(output.shape[1:])).astype(np.float64)


class Scorer:
    """Calls a network on NumPy columns, on the device of its parameters. Can be pickled by cloudpickle.

    ``columns`` are the output columns, if these may have changed places since the layout was determined.
    """

    def __init__(
        self, module: torch.nn.Module, layout: Layout, finish: Finish, columns: tuple[str, ...] | None = None
    ) -> None:
        self.module, self.layout, self.finish = module, layout, finish
        self.columns = layout.outputs if columns is None else columns
        self._rows = RowCount()

    def __call__(self, columns: Mapping[str, np.ndarray | list[np.ndarray]]) -> dict[str, np.ndarray]:
        """Predict a batch. columns: by name, arrays of [rows] or [rows, …], or lists of arrays of different lengths.

        Raises ``DataError`` for NaN, infinity and nulls, naming column and row, and for invalid category indexes.
        """
        rows = len(next(iter(columns.values())))
        exact = {*self.layout.categories, *self.layout.whole}
        columns = {name: values if name in exact else _as_trained(values) for name, values in columns.items()}
        check_finite(columns, list(columns), self._rows.next(rows))
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        batch = {name: _tensor(values).to(device) for name, values in columns.items()}
        check_indexes(batch, self.layout.categories)
        check_whole(batch, self.layout.whole)
        with in_evaluation(self.module), torch.no_grad():  # a network may keep tensors, and train with them later
            value = self.layout.call(self.module, batch)
        outputs = [_of_rows(output, rows) for output in outputs_of(value, self.layout)]
        if isinstance(value, Mapping):
            outputs = in_order(outputs, self.layout.outputs, self.columns)
        return self.finish([_array(output, place) for place, output in enumerate(outputs)])

    def on_cpu(self) -> Scorer:
        """Return this scorer, or if the network is on a GPU, a scorer with a CPU copy."""
        if all(tensor.device.type == "cpu" for tensor in self.module.state_dict().values()):
            return self
        return Scorer(copy.deepcopy(self.module).cpu(), self.layout, self.finish, self.columns)


def _of_rows(output: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an output as [rows, …]. A network that ends in squeeze() also drops the dimension of a single row.

    Raises ValueError if the network returns another number of rows than it was given.
    """
    if rows == 1 and output.shape[:1] != (1,):
        return output.unsqueeze(0)
    if output.shape[:1] != (rows,):
        shape = list(output.shape)
        raise ValueError(
            f"the network returned an output of shape {shape} for {rows} rows, not [{rows}] or [{rows}, …]"
        )
    return output


def _array(output: torch.Tensor, place: int) -> np.ndarray:
    """Return an output as a NumPy array without loss of precision. NumPy has no bfloat16."""
    if output.is_complex():
        raise ValueError(
            f"output {place} of the network is complex, and a column holds real numbers: return torch.view_as_real of it, its "
            "abs() or its real part"
        )
    is_half = output.is_floating_point() and output.itemsize < torch.float32.itemsize
    return (output.float() if is_half else output).numpy(force=True)


@contextlib.contextmanager
def in_evaluation(module: torch.nn.Module) -> Iterator[None]:
    """Put all parts of a network into evaluation mode, and afterwards put those that were training back."""
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


class PredictionUdf:
    """Predictions as one column of Spark: a struct of the outputs.

    shapes: the shape of one row of each feature; None for lists of different lengths, which go through a plain pandas UDF,
    because ``predict_batch_udf`` takes only arrays of one shape. The network travels inside the function, which Spark
    broadcasts if it is large; Spark Connect sends it with each query. use_gpu: see ``scoring_device``.
    """

    def __init__(
        self,
        scorer: Scorer,
        shapes: Mapping[str, tuple[int, ...] | None],
        kind: StructType,
        batch_size: int,
        use_gpu: bool | None = None,
    ) -> None:
        self._shapes = {name: shapes.get(name) for name in scorer.layout.features}
        network = cloudpickle.dumps(scorer.on_cpu())
        names = list(self._shapes)
        # A column of numbers is faster in Spark than a struct with one number.
        self._only = kind.names[0] if len(kind.names) == 1 and None not in self._shapes.values() else None
        if None in self._shapes.values():
            self._udf = _ragged_udf(network, names, kind, batch_size, use_gpu)
        else:
            tensors = {place: list(shape) for place, (_, shape) in enumerate(self._shapes.items()) if shape}
            returned = kind if self._only is None else kind[self._only].dataType
            batched: Any = predict_batch_udf(
                _maker(network, names, self._only, use_gpu),
                return_type=returned,
                batch_size=batch_size,
                input_tensor_shapes=tensors or None,
            )
            self._udf = pandas_udf(_after(_with_own_names, batched.func), returned)  # type: ignore[call-overload]

    def __call__(self, frame: DataFrame) -> Column:
        """Return the column of predictions for a DataFrame with the features."""
        schema = frame.schema  # read once: each time Spark Connect makes a copy of it
        kinds = {field.name: field.dataType for field in schema}
        shown = shown_columns(frame, schema)[:SHOWN] if any(is_list(kinds[name]) for name in self._shapes) else []
        found = self._udf(*(_as_input(name, kinds[name], shape, shown) for name, shape in self._shapes.items()))
        return found if self._only is None else f.struct(found.alias(self._only))

    def register(self, session: SparkSession, name: str) -> Callable[..., Column]:
        """Register the function of the features under a SQL name, and return it."""
        inner: Any = self._udf
        predict = _after(features_of(name, self._shapes), inner.func)
        udf = pandas_udf(predict, inner.returnType)  # type: ignore[call-overload]
        registered: Callable[..., Column] = session.udf.register(name, udf)
        return registered


def _after(
    convert: Callable[[S], T], function: Callable[[Iterator[T]], Iterator[R]]
) -> Callable[[Iterator[S]], Iterator[R]]:
    """Return ``function``, which maps batches of features to predictions, of batches that ``convert`` has changed before."""
    import pandas as pd

    def predict(batches: Iterator[S]) -> Iterator[R]:
        return function(map(convert, batches))

    # From these types Spark infers that the function maps iterators of batches; it looks for classes.
    predict.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    return predict


def _with_own_names(batch: pd.Series | tuple[pd.Series, ...]) -> pd.Series | tuple[pd.Series, ...]:
    """Give each feature of a batch a name of its own.

    ``predict_batch_udf`` looks columns up by name. Spark passes one series for all arguments that are the same expression.
    """
    if not isinstance(batch, tuple):
        return batch
    return tuple(values.rename(f"feature_{place}") for place, values in enumerate(batch))


def _maker(
    network: bytes, names: Sequence[str], only: str | None, use_gpu: bool | None
) -> Callable[[], Callable[..., Predicted]]:
    """Return the function that ``predict_batch_udf`` calls once in a Python worker.

    only: the name of the one output, if it is not to be in a struct.
    """

    def make() -> Callable[..., Predicted]:
        scorer: Scorer = cloudpickle.loads(network)

        def predict(*columns: np.ndarray) -> Predicted:
            scorer.module.to(scoring_device(use_gpu))  # a Python worker may serve tasks with different GPUs
            found = scorer(dict(zip(names, columns, strict=True)))
            return found if only is None else found[only]

        # Spark infers from the number of parameters that each column is a separate input.
        positional = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(f"column_{place}", positional) for place in range(len(names))]
        predict.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return predict

    return make


def _ragged_udf(
    network: bytes, names: Sequence[str], kind: StructType, batch_size: int, use_gpu: bool | None
) -> Callable[..., Column]:
    loaded: list[Scorer] = []

    def predict(batches: Iterator[pd.Series | tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        import pandas as pd

        if not loaded:
            loaded.append(cloudpickle.loads(network))
        loaded[0].module.to(scoring_device(use_gpu))
        for batch in batches:
            series = batch if isinstance(batch, tuple) else (batch,)
            for start in range(0, len(series[0]), batch_size):
                part = {name: _values(one[start : start + batch_size]) for name, one in zip(names, series, strict=True)}
                found = loaded[0](part)
                yield pd.DataFrame(
                    {name: list(values) if values.ndim > 1 else values for name, values in found.items()}
                )

    if len(names) == 1:
        predict.__annotations__ = {"batches": Iterator["pd.Series"], "return": Iterator["pd.DataFrame"]}
    udf: Callable[..., Column] = pandas_udf(predict, kind, PandasUDFType.SCALAR_ITER)  # type: ignore[call-overload]
    return udf


def _values(series: pd.Series) -> np.ndarray | list[np.ndarray]:
    return list(series) if series.dtype == object else series.to_numpy()


def _as_trained(values: np.ndarray | list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """Return doubles as the 32-bit floats that ``fit`` trains on, in which very large numbers are infinite."""
    if isinstance(values, list):
        return [np.asarray(_as_trained(np.asarray(row))) for row in values]
    with np.errstate(over="ignore"):
        return values.astype(np.float32) if values.dtype == np.float64 else values


def _tensor(values: object) -> torch.Tensor:
    if isinstance(values, list):
        return torch.nested.nested_tensor([torch.as_tensor(np.array(row)) for row in values], layout=torch.jagged)
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _as_input(name: str, kind: DataType, shape: tuple[int, ...] | None, shown: Sequence[str]) -> Column:
    if is_list(kind):
        value = as_list(name, kind)
        nested = isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType)
        return _or_error(name, f.flatten(value) if nested else value, shape, shown)
    return column(name).cast(DoubleType()) if isinstance(kind, DecimalType) else column(name)


def _or_error(name: str, value: Column, shape: tuple[int, ...] | None, shown: Sequence[str]) -> Column:
    """Return the list, or an error naming column and row if it is null or its length differs from ``shape``.

    Otherwise Spark would fail at such a row before Python sees it, and name neither. shown: the columns that tell the row.
    """
    row = f.concat(f.lit("the row "), f.to_json(f.struct(*map(column, shown)))) if shown else f.lit("a row")
    message = f.concat(f.lit(f"column {name!r} is null in "), row, f.lit("; fill such values or drop the rows"))
    checked = f.when(column(name).isNull(), f.raise_error(message))
    if shape is not None:
        width = math.prod(shape)
        length = f.size(value).cast("string")
        message = f.concat(
            f.lit(f"column {name!r} has "), length, f.lit(f" values, where the model takes {width}, in "), row
        )
        checked = checked.when(f.size(value) != width, f.raise_error(message))
    return checked.otherwise(value)


def check_features(frame: DataFrame, shapes: Mapping[str, tuple[int, ...] | None], features: Sequence[str]) -> None:
    """Raise ValueError for a missing or duplicate feature, TypeError for one of the wrong type (number or list)."""
    schema = frame.schema
    for name in features:
        check_columns(schema, [name], "features")
        kind: DataType = schema[name].dataType
        if is_list(kind) == (shapes.get(name) == ()):
            raise TypeError(
                f"column {name!r} is {kind.simpleString()}, and the model was trained on rows of shape {shapes.get(name)}"
            )
