"""Estimators whose fits are planned and tried on made-up rows, and not started."""

from __future__ import annotations

from typing import Any

import torch
from pyspark.sql.types import ArrayType, BinaryType, DoubleType, LongType, StringType, StructField, StructType

from spark_elastic.estimator import TorchClassifier, TorchEstimator
from spark_elastic.estimator.plan import DataPlan
from spark_elastic.estimator.planning import made_up_batch, plan_data, plan_recipe, plan_split

BY_STEPS = {
    "scheduler": torch.optim.lr_scheduler.OneCycleLR,
    "schedulerParams": {"max_lr": 1.0},
    "schedulerInterval": "step",
}

SCHEMA = StructType(
    [
        StructField("x", DoubleType()),
        StructField("y", DoubleType()),
        StructField("n", LongType()),
        StructField("text", StringType()),
        StructField("list", ArrayType(DoubleType())),
        StructField("matrix", ArrayType(ArrayType(DoubleType()))),
        StructField("image", StructType([StructField("data", BinaryType())])),
        StructField("code", DoubleType(), metadata={"ml_attr": {"type": "nominal", "vals": ["a", "b"]}}),
    ]
)


def make(**params: Any) -> TorchEstimator:
    given = {
        "model": torch.nn.Linear(1, 1),
        "loss": torch.nn.MSELoss(),
        "featureCols": ["x"],
        "labelCols": ["y"],
        **params,
    }
    return TorchEstimator(**{name: value for name, value in given.items() if value is not None})


def recipe(estimator: TorchEstimator) -> Any:
    layout = estimator._layout(SCHEMA)
    plan_split(estimator, estimator.value("validationIndicatorCol"), SCHEMA)
    planned = plan_recipe(estimator, layout, estimator._default_loss())
    batch = made_up_batch(layout, SCHEMA)
    return planned if batch is None else planned.checked_on(batch)


def data_of(estimator: TorchEstimator) -> DataPlan:
    return plan_data(estimator, ("train", None), {}, False)


def classifier_model(outputs: int, **params: Any) -> Any:
    classifier = TorchClassifier(model=torch.nn.Linear(1, outputs), featuresCol="x", labelCol="y", **params)
    return classifier._untrained(recipe(classifier), {"x": torch.zeros(3, 1), "y": torch.zeros(3)})
