"""TorchRegressor: one number per row, with Spark ML's shared columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from pyspark.ml.evaluation import Evaluator, RegressionEvaluator
from pyspark.ml.regression import RegressionModel, Regressor

from spark_elastic._saved_names import saved_as
from spark_elastic.estimator.frame import Facts
from spark_elastic.estimator.layout import Layout
from spark_elastic.estimator.model import Flat
from spark_elastic.estimator.objective import Loss
from spark_elastic.estimator.prediction import PredictionModel, Predictor
from spark_elastic.estimator.transform import Finish

Metric = Literal["rmse", "mse", "mae", "r2"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@saved_as("spark_elastic.estimator")
class TorchRegressor(Predictor, Regressor["TorchRegressionModel"]):
    """Trains a network that returns one number per row. The default loss is the mean squared error."""

    def _default_loss(self) -> Loss:
        return torch.nn.MSELoss()

    def _make_model(self, layout: Layout) -> TorchRegressionModel:
        return TorchRegressionModel()


@saved_as("spark_elastic.estimator")
class TorchRegressionModel(PredictionModel, RegressionModel[Any]):  # type: ignore[misc]  # predict takes many rows, too
    """Adds ``predictionCol``, a double."""

    def _check(self, facts: Facts) -> None:
        if self.widths != [0]:
            raise ValueError(
                f"a regressor's model returns one number per row; this one returns outputs of {self.widths} numbers"
            )

    def _outputs(self) -> dict[str, int]:
        return {self.value("predictionCol"): 0} if self.value("predictionCol") else {}

    def _finish(self, outputs: Mapping[str, int]) -> Finish:
        return Flat(tuple(outputs.items()))

    def _evaluators(self, columns: Mapping[str, Any]) -> dict[str, Evaluator]:
        return {name: RegressionEvaluator(metricName=name, **columns) for name in METRICS}
