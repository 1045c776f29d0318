"""What a model learns of a network that was trained elsewhere from its first rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType
from torch import nn

from spark_elastic.estimator import TorchModel
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.unfitted import describe_from_frame


def test_a_model_around_a_network_of_elsewhere_keeps_the_types_of_its_first_rows() -> None:
    frame: Any = SimpleNamespace(schema=StructType([StructField("x", DoubleType())]))
    model = TorchModel(model=nn.Linear(1, 1), featureCols=["x"])
    describe_from_frame(model, Layout((Input(None, ("x",)),)), frame)
    assert model.layout.arguments({"x": torch.arange(3)})[0][0].dtype == torch.float32


def test_a_stream_whose_lists_have_an_unknown_length_is_refused_before_rows_are_asked_for() -> None:
    schema = StructType([StructField("v", ArrayType(DoubleType()))])
    frame: Any = SimpleNamespace(schema=schema, isStreaming=True)
    model = TorchModel(model=nn.Linear(1, 1), featureCols=["v"])
    with pytest.raises(
        ValueError, match="transform a batch DataFrame first: the length of the lists in column 'v' is not"
    ):
        describe_from_frame(model, Layout((Input(None, ("v",)),)), frame)
