"""The Spark ML face: ``TorchEstimator.fit(df)`` trains elastically, ``TorchModel.transform(df)`` predicts.

Names are imported on first use, so that workers, which import the training function from here, need no pyspark.ml.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_elastic._lazy import lazily

if TYPE_CHECKING:
    from spark_elastic.estimator.callbacks import BestModel, Callback, EarlyStopping, EpochContext, MLflow, TensorBoard
    from spark_elastic.estimator.classifier import TorchClassificationModel, TorchClassifier
    from spark_elastic.estimator.estimator import TorchEstimator
    from spark_elastic.estimator.model import TorchModel
    from spark_elastic.estimator.regressor import TorchRegressionModel, TorchRegressor
    from spark_elastic.estimator.store import Store

__all__ = [
    "BestModel",
    "Callback",
    "EarlyStopping",
    "EpochContext",
    "MLflow",
    "Store",
    "TensorBoard",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
]

_HOMES = {
    "BestModel": "callbacks",
    "Callback": "callbacks",
    "EarlyStopping": "callbacks",
    "EpochContext": "callbacks",
    "MLflow": "callbacks",
    "Store": "store",
    "TensorBoard": "callbacks",
    "TorchClassificationModel": "classifier",
    "TorchClassifier": "classifier",
    "TorchEstimator": "estimator",
    "TorchModel": "model",
    "TorchRegressionModel": "regressor",
    "TorchRegressor": "regressor",
}

__getattr__ = lazily(__name__, _HOMES)
