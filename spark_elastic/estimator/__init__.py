"""The Spark ML interface: ``TorchEstimator.fit(df)`` trains elastically, ``TorchModel.transform(df)`` predicts.

Names are imported on first use, so that workers, which import the training function from this package, need no pyspark.ml.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_elastic._lazy import lazily

if TYPE_CHECKING:
    from spark_elastic.estimator.callbacks import BatchContext as BatchContext
    from spark_elastic.estimator.callbacks import BestModel as BestModel
    from spark_elastic.estimator.callbacks import Callback as Callback
    from spark_elastic.estimator.callbacks import EarlyStopping as EarlyStopping
    from spark_elastic.estimator.callbacks import EpochContext as EpochContext
    from spark_elastic.estimator.callbacks import FitContext as FitContext
    from spark_elastic.estimator.callbacks import MLflow as MLflow
    from spark_elastic.estimator.callbacks import TensorBoard as TensorBoard
    from spark_elastic.estimator.classifier import TorchClassificationModel as TorchClassificationModel
    from spark_elastic.estimator.classifier import TorchClassifier as TorchClassifier
    from spark_elastic.estimator.estimator import TorchEstimator as TorchEstimator
    from spark_elastic.estimator.learning_rate import LearningRates as LearningRates
    from spark_elastic.estimator.model import TorchModel as TorchModel
    from spark_elastic.estimator.regressor import TorchRegressionModel as TorchRegressionModel
    from spark_elastic.estimator.regressor import TorchRegressor as TorchRegressor
    from spark_elastic.estimator.saved_network import load_network as load_network
    from spark_elastic.estimator.store import Store as Store

_HOMES = {
    "BatchContext": "callbacks",
    "BestModel": "callbacks",
    "Callback": "callbacks",
    "EarlyStopping": "callbacks",
    "EpochContext": "callbacks",
    "FitContext": "callbacks",
    "LearningRates": "learning_rate",
    "MLflow": "callbacks",
    "Store": "store",
    "TensorBoard": "callbacks",
    "TorchClassificationModel": "classifier",
    "TorchClassifier": "classifier",
    "TorchEstimator": "estimator",
    "TorchModel": "model",
    "TorchRegressionModel": "regressor",
    "TorchRegressor": "regressor",
    "load_network": "saved_network",
}

__all__ = sorted(_HOMES)

__getattr__ = lazily(__name__, _HOMES)
