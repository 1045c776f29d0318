"""Rows of existing data, which nobody has looked at ahead of the fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fit_plans import plan
from torch import nn

from spark_elastic.data import read_manifest
from spark_elastic.errors import DataError
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.training import train


def test_negative_weights_in_existing_data_name_the_column(weigh: Any) -> None:
    with pytest.raises(DataError, match="weightCol: column 'w' has weights below 0, down to -1"):
        train(plan(weigh("negative", [1.0] * 19 + [-1.0]), weight="w", data={"check": True}))


def test_weights_whose_sum_is_no_float_are_an_error(weigh: Any) -> None:
    with pytest.raises(DataError, match=r"the largest weight of column 'w' is 1e\+37"):
        train(plan(weigh("large", [1e37] * 20), weight="w", data={"check": True}))


def test_weights_of_any_other_size_give_the_same_model(weigh: Any) -> None:
    """Weights of 1e-32 gave a fourth of the loss."""
    losses = [
        train(plan(weigh(f"of {size}", [size] * 20), weight="w", data={"check": True})).history[-1]["loss"]  # type: ignore[union-attr]
        for size in (1.0, 1e-30, 1e-35, 1e30)
    ]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_nan_in_existing_data_names_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, float("nan")], "y": [1.0, 2.0]}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match="column 'x' has NaN"):
        train(plan(tmp_path.as_uri(), data={"validation_url": None, "check": True}))
    assert len(read_manifest(tmp_path)) == 1


def test_a_fraction_in_existing_data_is_no_class(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": [1.0, 0.7]}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match=r"column 'y' has the label 0.7"):
        train(plan(tmp_path.as_uri(), data={"validation_url": None, "check": True}, class_labels=("y",)))


@pytest.mark.parametrize("label", [-100, 2])
def test_a_label_in_existing_data_that_is_no_class_of_a_classifier_is_named(tmp_path: Path, label: int) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": [1, label]}), tmp_path / "part.parquet")
    data = {"validation_url": None, "check": True}
    entropy = {"model": nn.Linear(1, 2), "objective": Objective((nn.CrossEntropyLoss(),))}
    with pytest.raises(
        DataError, match=rf"'y' has labels from {min(1, label)} to {max(1, label)}; with 2 classes they go"
    ):
        train(plan(tmp_path.as_uri(), data=data, class_labels=("y",), classes=2, **entropy))
