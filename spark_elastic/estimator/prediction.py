"""The common part of classifier and regressor: Spark ML's columns, features, one label, predict and evaluate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pyspark.ml.evaluation import Evaluator
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasValidationIndicatorCol,
    HasWeightCol,
)
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from spark_elastic.estimator.accessors import HasPredictorColsAccessors, PredictorAccessors
from spark_elastic.estimator.converters import names
from spark_elastic.estimator.estimator import ElasticEstimator
from spark_elastic.estimator.frame import check_columns, check_scalars, column, with_fields
from spark_elastic.estimator.layout import Layout, positional_inputs
from spark_elastic.estimator.model import ElasticModel
from spark_elastic.estimator.params import CATEGORICAL_COLS, FEATURE_COLS, param
from spark_elastic.estimator.transform import Finish

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self


class HasPredictorCols(HasLabelCol, HasFeaturesCol, HasPredictionCol, HasWeightCol, HasPredictorColsAccessors):
    """Spark ML's columns of predictors, and columns of categories."""

    featureCols = param("featureCols", FEATURE_COLS, names)
    categoricalCols = param("categoricalCols", CATEGORICAL_COLS, names)


def layout_of(params: Predictor | PredictionModel) -> Layout:
    """Return the roles of the columns that the Params name. Raises ValueError if two Params name features."""
    features = params.value("featureCols")
    if features and params.isSet("featuresCol"):
        raise ValueError(
            f"give one of featuresCol and featureCols, not both: {params.value('featuresCol')!r}, {features}"
        )
    inputs = positional_inputs(features or [params.value("featuresCol")], params.value("categoricalCols"))
    return Layout(tuple(inputs), (params.value("labelCol"),), params.value("weightCol"))


class Predictor(ElasticEstimator, HasPredictorCols, HasValidationIndicatorCol, PredictorAccessors):
    """Trains on ``labelCol`` and ``featuresCol``, or several ``featureCols``. ``categoricalCols`` are the last argument."""

    def _layout(self, schema: StructType) -> Layout:
        layout = self._layout_of_names()
        check_scalars(schema, layout.categories, "categoricalCols")
        check_columns(schema, layout.features, "featureCols" if self.value("featureCols") else "featuresCol")
        check_scalars(schema, layout.labels, "labelCol")
        if layout.weight:
            check_scalars(schema, [layout.weight], "weightCol")
        return layout

    def _layout_of_names(self) -> Layout:
        return layout_of(self)


class PredictionModel(ElasticModel, HasPredictorCols):
    """A network that predicts one number per row."""

    # The Params that name columns of transform which evaluators take.
    _scored: ClassVar[tuple[str, ...]] = ("predictionCol",)

    def _set(self, **params: object) -> Self:
        # The newer one of the two counts. A copy, which sets all Params one by one, would else feed the older one again.
        if isinstance(name := params.get("featuresCol"), str):
            self._feed([name])
            self.clear(self.featureCols)
        if params.get("featureCols") is not None:
            self._feed(names(params["featureCols"]))
            self.clear(self.featuresCol)
        if params.get("categoricalCols") is not None:
            self._feed(names(params["categoricalCols"]), categorical=True)
        return super()._set(**params)

    def copy(self, extra: ParamMap | None = None) -> Self:
        """Return a copy with Params of its own and the same network. ``extra`` is set after the others."""
        copied = super().copy()
        return copied._set(**{entry.name: value for entry, value in (extra or {}).items() if entry in self.params})

    def _layout_of_names(self) -> Layout:
        return layout_of(self)

    @property
    def numFeatures(self) -> int:
        """The number of numbers in a row's features; -1 while that is unknown, and if rows have lists of any length."""
        shapes = [self.shapes.get(name) for name in self._numeric]
        return sum(math.prod(shape) for shape in shapes if shape is not None) if shapes and None not in shapes else -1

    @property
    def _numeric(self) -> list[str]:
        """The feature columns that are not categories."""
        return [name for entry in self.layout.inputs if not entry.categorical for name in entry.columns]

    def predict(self, x: object, categories: object = None) -> float | np.ndarray:
        """Predict on the driver: a float for the features of one row, an array for [rows, features].

        x: with ``featureCols``, the numbers of all columns of a row, concatenated. Rows of any length are a list of lists.
            Not looked at if the network takes only ``categoricalCols``.
        categories: the indexes of a row, or [rows, columns], if the network takes ``categoricalCols``.
        """
        found, is_row = self._score(x, categories, self._finish({"prediction": 0}))
        return float(found[0]) if is_row else found

    def _score(self, x: object, categories: object, finish: Finish) -> tuple[np.ndarray, bool]:
        """Return the one column that ``finish`` makes, and whether ``x`` holds the features of a single row."""
        if not self.layout.inputs:
            raise ValueError(
                "the shape of a row is not known yet: call transform first, or take the model that fit returns"
            )
        given = x.toArray() if hasattr(x, "toArray") else x
        if self._numeric:
            columns, is_row = self._numbers_of(given)
            rows = len(next(iter(columns.values())))
        else:  # the network takes categories only
            indexes = np.asarray(categories)
            columns, is_row = {}, indexes.ndim < 2
            rows = 1 if is_row else len(indexes)
        (found,) = self._scorer(finish)({**columns, **self._columns_of(categories, rows)}).values()
        return found, is_row

    def _numbers_of(self, given: object) -> tuple[dict[str, np.ndarray | list[np.ndarray]], bool]:
        """Split numbers into columns, and say whether they are those of one row. Raises ValueError if they do not fit."""
        shapes = {name: self.shapes[name] for name in self._numeric}
        if None in shapes.values():
            return _lists_of(given, list(shapes))
        # Doubles distinguish all whole numbers that a network may take. The scorer makes 32-bit floats of the others.
        features = np.asarray(given, dtype=np.float64)
        shape = next(iter(shapes.values())) if len(shapes) == 1 else (self.numFeatures,)
        assert shape is not None
        is_row = features.ndim <= len(shape)
        width, found_width = math.prod(shape), features.size if is_row else math.prod(features.shape[1:])
        if found_width != width:
            raise ValueError(
                f"the network takes {width} numbers a row, [{width}] or [rows, {width}], not those of {list(features.shape)}"
            )
        return {**_divided(features.reshape(-1, *shape), shapes)}, is_row

    def _columns_of(self, categories: object, rows: int) -> dict[str, np.ndarray]:
        """Split the indexes of ``rows`` rows into columns. Raises ValueError if they do not fit the network's columns."""
        names = self.layout.categories
        found = np.empty((rows, 0)) if categories is None else np.asarray(categories).reshape(rows, -1)
        if found.shape[1] != len(names):
            raise ValueError(f"categories must have an index for each of {names} in each row, not {categories!r}")
        return {name: found[:, place] for place, name in enumerate(names)}

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """Return the usual metrics for a DataFrame with labels, under the names of Spark's evaluators.

        Raises ``ValueError`` for a streaming DataFrame, without a ``predictionCol``, without rows, and for labels and weights
        that are null or NaN.
        """
        if dataset.isStreaming:
            raise ValueError("evaluate takes a batch DataFrame, not a streaming one: call it in foreachBatch")
        if not self.value("predictionCol"):
            raise ValueError('predictionCol="" leaves out the predictions, of which evaluate computes its metrics')
        given = {role: self.value(role) for role in ("labelCol", "weightCol") if self.value(role)}
        scored = with_fields(self.transform(dataset), given.values())
        for role, name in given.items():
            check_scalars(scored.schema, [name], role)
        # Spark's evaluators take no booleans, and no name with a dot.
        made = {role: self.value(role) for role in self._scored if self.value(role)}
        columns = {role: f"spark_elastic_{role}" for role in (*given, *made)}
        plain = [column(name).cast("double").alias(columns[role]) for role, name in given.items()]
        found = scored.select(*plain, *(column(name).alias(columns[role]) for role, name in made.items())).persist()
        try:
            self._check_evaluated(found, given, columns)
            return {name: float(evaluator.evaluate(found)) for name, evaluator in self._evaluators(columns).items()}
        finally:
            found.unpersist()

    def _check_evaluated(self, found: DataFrame, given: Mapping[str, str], columns: Mapping[str, str]) -> None:
        """Raise ValueError for rows of which Spark's evaluators would make no sense, or a bare error from within the JVM."""
        bad = (f.col(columns[role]).isNull() | f.isnan(columns[role]) for role in given)
        counts = [f.sum(each.cast("int")).alias(role) for role, each in zip(given, bad, strict=True)]
        label = f.col(columns["labelCol"])
        extremes = f.min(label).alias("least"), f.max(label).alias("most"), f.max(label % 1).alias("fraction")
        (seen,) = found.agg(f.count(f.lit(1)).alias("rows"), *counts, *extremes).collect()
        if not seen["rows"]:
            raise ValueError("the DataFrame has no rows to evaluate")
        for role, name in given.items():
            if seen[role]:
                raise ValueError(
                    f"{role}: column {name!r} has nulls or NaN in {seen[role]} of {seen['rows']} rows; drop these rows"
                )
        self._check_labels(given["labelCol"], seen["least"], seen["most"], seen["fraction"])

    def _check_labels(self, name: str, least: float, most: float, fraction: float) -> None:
        """Raise ValueError for labels that cannot be evaluated. fraction: the largest."""

    def _evaluators(self, columns: Mapping[str, object]) -> dict[str, Evaluator]:
        raise NotImplementedError


def _lists_of(given: object, names: list[str]) -> tuple[dict[str, np.ndarray | list[np.ndarray]], bool]:
    """Return a column of rows of any length, and whether a single row was given. Raises ValueError if there are more columns."""
    if len(names) > 1:
        raise ValueError(f"rows of {names} cannot be told apart, because they have lists of any length: call transform")
    listed = list(given)  # type: ignore[call-overload]
    is_row = not listed or np.ndim(listed[0]) == 0
    rows: list[np.ndarray] = [np.asarray(row, dtype=np.float64) for row in ([listed] if is_row else listed)]
    return {names[0]: rows}, is_row


def _divided(rows: np.ndarray, shapes: Mapping[str, tuple[int, ...] | None]) -> dict[str, np.ndarray]:
    """Split [rows, numbers] into columns of these shapes. A single column takes all numbers, whatever its shape."""
    if len(shapes) == 1:
        return dict.fromkeys(shapes, rows)
    ends = np.cumsum([math.prod(shape or ()) for shape in shapes.values()])
    parts = np.split(rows, ends[:-1], axis=1)
    return {
        name: part.reshape(len(rows), *(shape or ())) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
