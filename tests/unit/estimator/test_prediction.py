"""What models predict on the driver, and what they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.estimator import TorchRegressionModel
from spark_elastic.estimator.layout import Input, Layout


def model(shape: tuple[int, ...]) -> TorchRegressionModel:
    network = nn.Linear(2, 1) if shape else nn.Flatten(0)
    layout = Layout((Input(None, ("x",)),), ("y",))
    return TorchRegressionModel(network, featuresCol="x").describe(layout=layout, shapes={"x": shape}, widths=[0])


@pytest.mark.parametrize("given", [np.ones(4), np.ones((3, 4)), [1.0], 1.0, np.ones((2, 2, 2))])
def test_rows_of_another_width_are_an_error_and_not_other_rows(given: Any) -> None:
    with pytest.raises(ValueError, match=r"the network takes 2 numbers a row, \[2\] or \[rows, 2\], not those of"):
        model((2,)).predict(given)


def test_a_row_is_a_number_and_rows_are_an_array() -> None:
    of_two, of_one = model((2,)), model(())
    expected = of_two.model(torch.ones(1, 2)).item()
    assert of_two.predict(np.ones(2)) == pytest.approx(expected)
    assert of_two.predict(np.ones((3, 2))).tolist() == pytest.approx([expected] * 3)
    assert of_one.predict(5.0) == 5.0
    assert of_one.predict([5.0, 6.0]).tolist() == [5.0, 6.0]
    assert of_one.predict([[5.0], [6.0]]).tolist() == [5.0, 6.0]
