"""The estimator that whole fits of the suite are made with."""

from __future__ import annotations

from typing import Any

import networks
import torch

from spark_elastic.estimator import TorchEstimator


def make(**params: Any) -> TorchEstimator:
    """An estimator of y from the vector that starts with two workers."""
    given = {
        "model": networks.dense(),
        "learningRate": 1e-2,
        "loss": torch.nn.MSELoss(),
        "featureCols": ["features"],
        "labelCols": ["y"],
        "globalBatchSize": 64,
        "minNp": 1,
        "numProc": 2,
        "maxNp": 2,
        "adaptiveNp": False,  # or fits would not be equal where one takes long
        "verbose": 0,
        **params,
    }
    return TorchEstimator(**{name: value for name, value in given.items() if value is not None})
