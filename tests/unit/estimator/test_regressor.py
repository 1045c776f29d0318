"""The regressor: its loss, and the column that its models add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unstarted_fits import recipe

from spark_elastic.estimator import TorchRegressionModel, TorchRegressor


def fitted(outputs: int, **params: Any) -> TorchRegressionModel:
    estimator = TorchRegressor(model=torch.nn.Linear(1, outputs), featuresCol="x", labelCol="y", **params)
    model = estimator._untrained(recipe(estimator), {"x": torch.zeros(3, 1), "y": torch.zeros(3)})
    assert isinstance(model, TorchRegressionModel)
    return model


def test_without_a_loss_it_learns_the_mean() -> None:
    objective = recipe(TorchRegressor(model=torch.nn.Linear(1, 1), featuresCol="x", labelCol="y")).objective
    assert [type(loss) for loss in objective.losses] == [torch.nn.MSELoss]


def test_a_network_of_several_numbers_a_row_is_no_regressor() -> None:
    fitted(1)._check({})
    several = TorchRegressionModel(torch.nn.Linear(1, 3)).describe(widths=[3])
    with pytest.raises(ValueError, match=r"returns one number per row; this one returns outputs of \[3\] numbers"):
        several._check({})


def test_the_prediction_has_the_name_that_is_given_and_an_empty_name_leaves_it_out() -> None:
    assert fitted(1)._outputs() == {"prediction": 0}
    assert fitted(1, predictionCol="price")._outputs() == {"price": 0}
    assert fitted(1, predictionCol="")._outputs() == {}
