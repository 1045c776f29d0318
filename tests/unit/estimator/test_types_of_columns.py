"""A network gets the types that it was trained on, whatever those of the columns that it scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql.types import DoubleType, LongType, StructField, StructType
from torch import nn

from spark_elastic.errors import DataError
from spark_elastic.estimator import TorchEstimator
from spark_elastic.estimator.estimator import _check_facts
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.planning import plan_recipe
from spark_elastic.estimator.row_checks import check_whole
from spark_elastic.estimator.transform import Scorer

FRACTIONAL = torch.tensor([1.0, 2.0, 3.0])


class Halves(nn.Module):
    """Takes both, and computes another half of whole numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if x.is_floating_point() else x // 2


def scored(trained: torch.Tensor, values: np.ndarray) -> list[float]:
    layout = Layout((Input(None, ("x",)),)).settled({"x": trained})
    return Scorer(Halves(), layout, lambda outputs: {"y": outputs[0]})({"x": values})["y"].tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32, np.float64])
def test_whole_numbers_are_fractional_to_a_network_that_was_trained_on_fractional_ones(dtype: Any) -> None:
    assert scored(FRACTIONAL, np.array([1, 2, 3], dtype)) == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_fractional_numbers_are_whole_to_a_network_that_was_trained_on_whole_ones(dtype: Any) -> None:
    assert scored(FRACTIONAL.int(), np.array([1, 2, 3], dtype)) == [0, 1, 1]


def test_a_fraction_is_no_whole_number() -> None:
    with pytest.raises(DataError, match=r"column 'x' has the value 2.5, and the network takes whole numbers there"):
        scored(FRACTIONAL.long(), np.array([1, 2.5]))


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ({"max": 9.5, "fraction": 9.5}, "column 'x' has the value 9.5.* inputs= says int64"),
        ({"max": 2.0**24, "fraction": None}, "inputs: column 'x' has the index 16777216 .* cast the column to long"),
    ],
)
def test_numbers_that_int64_would_change_are_refused_in_training(found: dict[str, Any], error: str) -> None:
    schema = StructType([StructField("x", DoubleType())])
    facts = {"x": {"min": 0.0, **found}}
    _check_facts(schema, Layout((Input("code", ("x",), "float32"),)), facts)
    with pytest.raises(ValueError, match=error):
        _check_facts(schema, Layout((Input("code", ("x",), "int64"),)), facts)


def test_a_fraction_is_found_in_lists_of_any_length() -> None:
    lists = torch.nested.nested_tensor([torch.tensor([1.0, 2.0]), torch.tensor([0.5])], layout=torch.jagged)
    with pytest.raises(DataError, match=r"column 'x' has the value 0.5"):
        check_whole({"x": lists}, ["x"])
    check_whole({"x": FRACTIONAL}, ["x"])


def test_a_model_keeps_the_types_of_its_training_and_whole_numbers_get_a_hint() -> None:
    schema = StructType([StructField("n", LongType()), StructField("y", DoubleType())])
    batch = {"n": torch.arange(7), "y": torch.arange(7.0)}

    def fitting(model: nn.Module) -> tuple[TorchEstimator, Any]:
        estimator = TorchEstimator(model=model, loss=nn.MSELoss(), featureCols=["n"], labelCols=["y"])
        return estimator, plan_recipe(estimator, estimator._layout(schema), None)

    estimator, recipe = fitting(nn.Embedding(7, 1))
    model = estimator._untrained(recipe.checked_on(batch), batch)
    assert [entry.dtype for entry in model.layout.inputs] == ["int64"]
    with pytest.raises(ValueError, match=r"cannot be called.* it takes fractional numbers: cast 'n' to double"):
        fitting(nn.Linear(1, 1))[1].checked_on(batch)
    batch["n"] = torch.zeros(7, 3, dtype=torch.uint8)  # as of a binary column, which Spark does not cast
    with pytest.raises(ValueError, match=r"it takes fractional numbers: call \.float\(\) on 'n' in forward"):
        fitting(nn.Linear(3, 1))[1].checked_on(batch)
