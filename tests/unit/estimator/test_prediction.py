"""What models predict on the driver, and what they take."""

from __future__ import annotations

from types import SimpleNamespace
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


def test_a_stream_is_not_evaluated() -> None:
    frame: Any = SimpleNamespace(isStreaming=True)
    with pytest.raises(ValueError, match="evaluate takes a batch DataFrame, not a streaming one"):
        model(()).evaluate(frame)


class Mixed(nn.Module):
    """The sum of two scalars, of a vector, and of ten times a category."""

    def forward(self, a: torch.Tensor, v: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        assert v.shape[1:] == (2,)
        return a.reshape(-1) + v.sum(1) + 10 * codes[:, 0]


def test_a_row_of_several_columns_is_their_numbers_one_after_the_other() -> None:
    inputs = (Input(None, ("a",)), Input(None, ("v",)), Input(None, ("c",), "int64", categorical=True))
    shapes: dict[str, Any] = {"a": (), "v": (2,), "c": ()}
    of_three = TorchRegressionModel(Mixed(), featureCols=["a", "v"], categoricalCols=["c"]).describe(
        layout=Layout(inputs, ("y",)), shapes=shapes, widths=[0]
    )
    assert of_three.numFeatures == 3
    assert of_three.predict([1, 2, 3], [1]) == 16.0
    assert of_three.predict([[1, 2, 3], [4, 5, 6]], [[1], [0]]).tolist() == [16.0, 15.0]
    with pytest.raises(
        ValueError, match=r"the network takes 3 numbers a row, \[3\] or \[rows, 3\], not those of \[2\]"
    ):
        of_three.predict([1, 2], [1])
    of_three.shapes["v"] = None
    assert of_three.numFeatures == -1
    with pytest.raises(ValueError, match=r"rows of .* cannot be told apart, because they have lists of any length"):
        of_three.predict([1, 2, 3], [1])


class Bag(nn.Module):
    """The sum of a row's numbers, and how many it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.sum() + 10 * len(row) for row in x.unbind()])


def test_a_row_of_any_length_is_a_list_and_rows_are_a_list_of_lists() -> None:
    of_lists = TorchRegressionModel(Bag(), featuresCol="x").describe(
        layout=Layout((Input(None, ("x",)),), ("y",)), shapes={"x": None}, widths=[0]
    )
    assert of_lists.predict([1.0, 2.0]) == 23.0
    assert of_lists.predict(np.ones(3)) == 33.0
    assert of_lists.predict([[1.0], [2.0, 3.0], []]).tolist() == [11.0, 25.0, 0.0]  # type: ignore[union-attr]


def test_a_network_of_categories_alone_takes_no_numbers() -> None:
    codes = TorchRegressionModel(nn.EmbeddingBag(3, 1), categoricalCols=["a", "b"]).describe(
        layout=Layout((Input(None, ("a", "b"), "int64", categorical=True),), ("y",)),
        shapes={"a": (), "b": ()},
        widths=[0],
    )
    assert isinstance(codes.predict(None, [0, 1]), float)
    assert np.shape(codes.predict(None, [[0, 1], [1, 2], [2, 0]])) == (3,)


def test_a_row_is_a_number_and_rows_are_an_array() -> None:
    of_two, of_one = model((2,)), model(())
    expected = of_two.model(torch.ones(1, 2)).item()
    assert of_two.predict(np.ones(2)) == pytest.approx(expected)
    assert of_two.predict(np.ones((3, 2))).tolist() == pytest.approx([expected] * 3)
    assert of_one.predict(5.0) == 5.0
    assert of_one.predict([5.0, 6.0]).tolist() == [5.0, 6.0]
    assert of_one.predict([[5.0], [6.0]]).tolist() == [5.0, 6.0]
