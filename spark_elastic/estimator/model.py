"""TorchModel: the Transformer that fit returns, which adds the network's outputs to a DataFrame."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import cloudpickle
import numpy as np
import torch
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

from spark_elastic._json import Json
from spark_elastic._saved_names import saved_as
from spark_elastic.estimator.accessors import ElasticModelAccessors, TorchModelAccessors
from spark_elastic.estimator.callbacks import Metrics
from spark_elastic.estimator.converters import boolean, module, names, text, whole
from spark_elastic.estimator.export import export_network
from spark_elastic.estimator.frame import Facts, check_case, check_free, column, in_rows, with_fields
from spark_elastic.estimator.layout import Input, Layout, change_places, positional_inputs
from spark_elastic.estimator.params import CATEGORICAL_COLS, FEATURE_COLS, FitParams, param
from spark_elastic.estimator.persistence import ModelReader, ModelWriter
from spark_elastic.estimator.sessions import prepare_python
from spark_elastic.estimator.transform import Finish, PredictionUdf, Scorer, as_rows, check_features
from spark_elastic.estimator.unfitted import describe_from_frame

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self

_STRUCT = "__spark_elastic_prediction"


@dataclass(frozen=True)
class TrainingSummary:
    """The common part of Spark ML's training summaries. ``model.history`` has the rest.

    objectiveHistory: the mean training loss of each epoch. totalIterations: the number of epochs.
    """

    objectiveHistory: list[float]
    totalIterations: int


class ElasticModel(Model, FitParams, MLReadable["ElasticModel"], MLWritable, ElasticModelAccessors):
    """A trained network as a Transformer, with the uid and the Params of its estimator. Subclasses define the output columns.

    A network that was trained elsewhere can be given as well. The shapes of its rows then come from the first DataFrame.

    model: the network, on the CPU. history: a dict for each epoch, with epoch, loss, val_loss, metrics, rows, seconds, and the
    sizes of the world. run_id: the name of the run in the store.
    """

    transformBatchSize = param("transformBatchSize", "rows of a batch in transform", whole(1))
    useGpu = param(
        "useGpu", "where transform runs: True: GPUs only, False: CPUs only, None: what Spark has assigned", boolean
    )
    defaults: ClassVar[dict[str, Json]] = {"transformBatchSize": 1024}

    def __init__(self, model: torch.nn.Module | None = None, **params: object) -> None:
        """Store the network itself, and set the Params. Raises ``TypeError`` and ``ValueError`` for values that do not fit."""
        try:
            self.model = None if model is None else module(model)
        except TypeError as error:
            raise TypeError(f"model= {error}") from None
        self.history: list[Metrics] = []
        self.run_id: str | None = None
        self.layout = Layout(())
        self.shapes: dict[str, tuple[int, ...] | None] = {}
        self.widths: list[int] = []
        self.label_metadata: dict[str, Json] = {}
        self.is_probability = False
        self._udf: tuple[object, PredictionUdf] | None = None
        super().__init__(**params)

    def describe(self, **facts: object) -> Self:
        """Set facts from training, such as layout, shapes, widths and history."""
        for name, value in facts.items():
            setattr(self, name, value)
        return self

    def __getstate__(self) -> dict[str, object]:
        """Leave out the UDF of this session, which cannot be pickled."""
        return {**self.__dict__, "_udf": None}

    def copy(self, extra: ParamMap | None = None) -> Self:
        """Return a copy with Params of its own and the same network."""
        copied = super().copy(extra)
        copied._udf = None
        return copied

    @property
    def hasSummary(self) -> bool:
        """Whether the model comes from a fit."""
        return bool(self.history)

    @property
    def summary(self) -> TrainingSummary:
        """The summary of the fit. Raises ``RuntimeError``, as Spark's models do, if there was no fit."""
        if not self.history:
            raise RuntimeError(f"there is no training summary: this {type(self).__name__} does not come from a fit")
        return TrainingSummary([float(entry["loss"]) for entry in self.history], len(self.history))

    def explain(self) -> str:
        """Describe the network: its class, its parameters and bytes, and the shapes of its arguments and outputs.

        An argument is shown by its keyword and its columns, in parentheses if several go side by side into one argument.
        """
        if self.model is None:
            return f"{type(self).__name__} without a network"
        parameters = list(self.model.parameters())
        count, trained = (sum(each.numel() for each in some) for some in (parameters, filter(_learns, parameters)))
        tensors = [*parameters, *self.model.buffers()]
        size = sum(each.numel() * each.element_size() for each in tensors)
        lines = [
            f"{type(self.model).__name__}: {count:,} parameters, {trained:,} of them trainable; {size:,} bytes with its buffers"
        ]
        inputs = [f"{_argument(entry)} {_row(entry.row_shape(self.shapes))}" for entry in self.layout.inputs]
        outputs = [_row((width,) if width else ()) for width in self.widths]
        if inputs:
            lines.append(f"inputs: {', '.join(inputs)}; outputs: {', '.join(outputs)}")
        if self.history:
            lines.append(f"trained for {len(self.history)} epochs, loss {self.history[-1]['loss']:.6g}")
        return "\n".join(lines)

    def _feed(self, columns: Sequence[str], *, categorical: bool = False) -> None:
        """Feed these columns to the network's positional arguments, or to that of categories, once its inputs are known."""
        inputs = self.layout.inputs
        if not inputs:
            return
        taken = [name for entry in inputs if entry.categorical == categorical for name in entry.columns]
        if len(columns) != len(taken) or any(entry.name is not None for entry in inputs):
            raise ValueError(f"the model takes {len(taken)} columns, {taken}, and cannot take {list(columns)}")
        new = iter(columns)
        fed = tuple(
            replace(entry, columns=tuple(islice(new, len(entry.columns))))
            if entry.categorical == categorical
            else entry
            for entry in inputs
        )
        pairs = [
            pair for old, now in zip(inputs, fed, strict=True) for pair in zip(old.columns, now.columns, strict=True)
        ]
        self.shapes = {now: self.shapes.get(old) for old, now in pairs}
        self.layout = replace(self.layout, inputs=fed)

    # ------------------------------------------------------------------ for subclasses

    def _outputs(self) -> dict[str, int]:
        """Return how many numbers a row of each output column has, by name; 0 for a single number that is not a vector."""
        raise NotImplementedError

    def _finish(self, outputs: Mapping[str, int]) -> Finish:
        """Return the function that makes output columns from the network's outputs; see ``Scorer``."""
        raise NotImplementedError

    @property
    def _label_classes(self) -> int | None:
        """The number of classes that labels may have; None if labels need not be classes."""
        return None

    def _check(self, facts: Facts) -> None:
        """Raise ValueError if the network's outputs do not fit the Params or the facts of the training data."""

    def _layout_of_names(self) -> Layout:
        """Return the roles of the columns that the Params name, for a network that was trained elsewhere."""
        raise NotImplementedError

    def _metadata(self, name: str) -> dict[str, Json]:
        return {}

    # ------------------------------------------------------------------ Spark

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if self.model is None:
            raise ValueError(f"{type(self).__name__} has no network: give model=, or take the model that fit returns")
        layout = self.layout if self.layout.inputs else self._layout_of_names()
        frame = with_fields(dataset, layout.features)
        fields = [column(name) for name in layout.features if name not in dataset.columns]
        check_case(frame, layout.features)
        if not self.layout.inputs:
            describe_from_frame(self, layout, frame)
        self._check({})
        prepare_python(dataset.sparkSession)
        outputs = self._outputs()
        check_features(frame, self.shapes, self.layout.features)
        check_free(frame, outputs)
        if not outputs:
            return dataset
        rows = in_rows(frame, self.layout.features)
        found = rows.withColumn(_STRUCT, self._prediction_udf(rows.sparkSession, outputs)(rows))
        made = [self._output(name, width) for name, width in outputs.items()]
        return found.select("*", *made).drop(_STRUCT, *fields)  # "*", because unused columns may share a name

    def udf(self, name: str, spark: SparkSession | None = None) -> Callable[..., Column]:
        """Register the model as a SQL function, as in ``SELECT name(a, b) FROM rows``, and return it.

        name: the function's name in SQL. spark: the session; by default the active one. The function takes the features in the
        order in which the Params name them, as numbers, arrays of numbers, or vectors. It returns the output if there is only
        one, otherwise a struct of the outputs, with arrays for vectors; NaN is null there. Raises ``ValueError`` without a
        network, or with one from elsewhere that has not transformed a DataFrame yet. If rows with vectors come straight from
        Parquet, Spark 4.2 and 4.3 need the setting ``spark.sql.execution.arrow.pythonUDF.columnarInput.enabled=false``.
        """
        session = spark or SparkSession.getActiveSession()
        if session is None:
            raise ValueError("there is no active SparkSession; give spark=")
        self._known_network()
        self._check({})
        prepare_python(session)
        return self._prediction_udf(session, self._outputs()).register(session, name)

    def export(self, path: str | os.PathLike[str], rows: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the network as a program that runs without its Python code, for batches of any number of rows.

        path: a local file. Its suffix determines the format: ``.pt2`` by ``torch.export``, which ``torch.export.load`` reads,
        or ``.onnx``, which requires onnx and onnxscript, and a network below 2 GB. Outputs in ONNX have the names of the output
        columns, or those in the dict that the network returns. rows: a few rows of the features, by column;
        by default fractional zeros. The program takes the arguments of ``forward``: columns positionally, or the keywords of
        ``inputs``. Raises ``ValueError`` for a network that cannot be exported, with torch's reason, and for columns of lists
        of different lengths.
        """
        export_network(self._known_network(), self.layout, self.shapes, os.path.expanduser(os.fspath(path)), rows)

    def _take_for_probabilities(self, outputs: Sequence[torch.Tensor], loss: object = None) -> None:
        """Find out whether outputs are probabilities, which only a classifier's model has to know."""

    def _known_network(self) -> torch.nn.Module:
        """Return the network. Raises ValueError if there is none, or if the shapes of its features are not known."""
        if self.model is None:
            raise ValueError(f"{type(self).__name__} has no network: give model=, or take the model that fit returns")
        if not self.layout.inputs:
            raise ValueError(
                f"{type(self).__name__} does not know the shapes of its features yet, because its network does not come from a "
                "fit: call transform on a DataFrame with them first"
            )
        return self.model

    def _output(self, name: str, width: int) -> Column:
        # Pandas knows no difference between NaN and null, and a network returns no null.
        value, nan = column(_STRUCT)[name], f.lit(math.nan)
        if width:
            filled = f.transform(value, lambda number: f.coalesce(number, nan))
            value = array_to_vector(f.when(f.exists(value, lambda number: number.isNull()), filled).otherwise(value))
        else:
            value = f.coalesce(value, nan)
        return value.alias(name, metadata=self._metadata(name))

    def _prediction_udf(self, session: SparkSession, outputs: Mapping[str, int]) -> PredictionUdf:
        """Return the UDF, which is made once for a set of outputs, so that executors keep their network for several queries."""
        key = (
            session.conf.get("spark.app.id"),
            tuple(outputs.items()),
            self.value("transformBatchSize"),
            str(self._paramMap),
            tuple(self.layout.features),
            _state_of(self.model),
        )
        if self._udf is None or self._udf[0] != key:
            fields = [
                StructField(name, ArrayType(DoubleType()) if width else DoubleType()) for name, width in outputs.items()
            ]
            udf = PredictionUdf(
                self._scorer(self._finish(outputs)),
                self.shapes,
                StructType(fields),
                self.value("transformBatchSize"),
                self.value("useGpu"),
            )
            self._udf = (key, udf)
        return self._udf[1]

    def _scorer(self, finish: Finish) -> Scorer:
        """Return a scorer of the network itself, not of a copy, so that the driver predicts on the parameters' device."""
        assert self.model is not None
        return Scorer(self.model, self.layout, finish)

    def write(self) -> MLWriter:
        """Return a writer; ``save(path)`` is short for ``write().save(path)``."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[ElasticModel]:
        """Return a reader; ``load(path)`` is short for ``read().load(path)``. Loading runs the saved code, and warns."""
        return ModelReader(cls)


def _learns(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad


def _argument(entry: Input) -> str:
    """Format an argument of ``forward``: its keyword, if it has one, and its columns."""
    columns = ", ".join(entry.columns)
    shown = columns if len(entry.columns) == 1 else f"({columns})"
    return shown if entry.name is None else f"{entry.name}={shown}"


def _row(shape: tuple[int, ...] | None) -> str:
    """Format the shape of a batch; None stands for lists of different lengths."""
    return "[rows, lists]" if shape is None else f"[{', '.join(['rows', *map(str, shape)])}]"


def _state_of(network: torch.nn.Module | None) -> bytes:
    """Return a digest of everything in a network: torch does not track changes of ``.data``, and nothing tracks attributes."""
    return hashlib.blake2b(cloudpickle.dumps(network)).digest()


def named_once(columns: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the widths of output columns by name. Raises ValueError for duplicate names."""
    found: dict[str, int] = {}
    for name, width in columns:
        if name in found:
            raise ValueError(f"two outputs have the column {name!r}; give each a name of its own")
        found[name] = width
    return found


@saved_as("spark_elastic.estimator")
class TorchModel(ElasticModel, TorchModelAccessors):
    """Adds ``outputCols``: a double if an output has one number per row, else a vector."""

    outputCols = param("outputCols", "columns for the network's outputs, in its order", names)
    featureCols = param("featureCols", FEATURE_COLS, names)
    categoricalCols = param("categoricalCols", CATEGORICAL_COLS, names)
    labelCols = param("labelCols", "columns of the labels that it was trained on", names)
    weightCol = param("weightCol", "column by which rows were weighted in training", text)

    def _set(self, **params: object) -> Self:
        if params.get("featureCols") is not None:
            self._feed(names(params["featureCols"]))
        if params.get("categoricalCols") is not None:
            self._feed(names(params["categoricalCols"]), categorical=True)
        return super()._set(**params)

    def _layout_of_names(self) -> Layout:
        features, categories, outputs = (self.value(name) for name in ("featureCols", "categoricalCols", "outputCols"))
        if not (features or categories) or not outputs:
            raise ValueError(
                "give featureCols, a column for each positional argument of forward, and outputCols, one for each output: "
                "this network does not come from a fit, which would have set them"
            )
        inputs = positional_inputs(features or (), categories)
        return Layout(tuple(inputs), tuple(self.value("labelCols") or ()), self.value("weightCol"), tuple(outputs))

    def _outputs(self) -> dict[str, int]:
        return named_once(zip(self.value("outputCols"), self.widths, strict=True))

    def _check(self, facts: Facts) -> None:
        if len(self.value("outputCols")) != len(self.widths):
            raise ValueError(
                f"outputCols must name the model's {len(self.widths)} outputs, not {self.value('outputCols')}"
            )
        if len(set(self.widths)) > 1 and change_places(self.value("outputCols"), self.layout.outputs):
            raise ValueError(
                f"outputCols={self.value('outputCols')} give names of outputs to outputs of other sizes: the network's are "
                f"called {list(self.layout.outputs)}, in this order. Take other names, or make a TorchModel of the network"
            )

    def _finish(self, outputs: Mapping[str, int]) -> Finish:
        return Flat(tuple(outputs.items()))

    def _scorer(self, finish: Finish) -> Scorer:
        assert self.model is not None
        return Scorer(self.model, self.layout, finish, tuple(self.value("outputCols")))


class Flat:
    """Makes [rows] or [rows, n] columns from outputs of any shape."""

    def __init__(self, outputs: Sequence[tuple[str, int]]) -> None:
        self.outputs = outputs

    def __call__(self, values: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the output columns, by name."""
        return {
            name: as_rows(value) if width else value.reshape(-1).astype(np.float64)
            for (name, width), value in zip(self.outputs, values, strict=False)
        }
