"""One step on the driver, which finds mistakes before Spark jobs start."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from unstarted_fits import make, recipe

from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.preflight import try_layouts


def test_a_scalar_becomes_a_matrix_only_for_models_that_want_one() -> None:
    assert recipe(make()).layout.inputs[0].expand
    assert not recipe(make(model=torch.nn.Embedding(3, 1), featureCols=["n"])).layout.inputs[0].expand


def test_columns_are_put_side_by_side_for_a_network_that_takes_one_argument() -> None:
    together = recipe(make(model=torch.nn.Linear(3, 1), featureCols=["x", "y", "code"], labelCols=["x"])).layout
    assert [entry.columns for entry in together.inputs] == [("x", "y", "code")]
    batch = {"x": torch.ones(2), "y": torch.zeros(2), "code": torch.full((2,), 2.0)}
    assert together.arguments(batch)[0][0].tolist() == [[1.0, 0.0, 2.0], [1.0, 0.0, 2.0]]
    apart = recipe(make(model=torch.nn.Bilinear(1, 1, 1), featureCols=["x", "y"], labelCols=["x"])).layout
    assert [entry.columns for entry in apart.inputs] == [("x",), ("y",)]
    with pytest.raises(ValueError, match=r"mat1 and mat2 .* side by side in one argument \[rows, 2\]"):
        recipe(make(model=torch.nn.Linear(5, 1), featureCols=["x", "y"], labelCols=["x"]))


def test_a_model_without_anything_to_train_is_an_error_that_says_so() -> None:
    with pytest.raises(
        ValueError, match="the model has nothing to train: it has no parameter whose requires_grad is True"
    ):
        recipe(make(model=torch.nn.Linear(1, 1).requires_grad_(False)))


def test_a_column_that_is_given_twice_is_put_side_by_side_too() -> None:
    twice = Layout((Input(None, ("x",)), Input(None, ("x",))))
    output, layout, _ = try_layouts(nn.Linear(2, 1), twice, {"x": torch.ones(4)})
    assert isinstance(output, torch.Tensor)
    assert output.shape == (4, 1)
    assert [entry.columns for entry in layout.inputs] == [("x", "x")]
