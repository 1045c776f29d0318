"""What a model's transform finds out of a DataFrame's columns before Spark begins, and what it makes of outputs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import types as t
from pyspark.util import PythonEvalType
from torch import nn

from spark_elastic.estimator import TorchModel
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.preflight import widths_of
from spark_elastic.estimator.transform import PredictionUdf, Scorer, check_features


def frame(**columns: t.DataType) -> Any:
    schema = t.StructType([t.StructField(name, kind) for name, kind in columns.items()])
    return SimpleNamespace(schema=schema, columns=schema.names)


@pytest.mark.parametrize(
    "kind", [t.DoubleType(), t.FloatType(), t.IntegerType(), t.BooleanType(), t.DecimalType(10, 2)]
)
def test_numbers_are_features(kind: t.DataType) -> None:
    check_features(frame(a=kind), {"a": ()}, ["a"])


@pytest.mark.parametrize(
    "kind",
    [
        t.StringType(),
        t.TimestampType(),
        t.DateType(),
        t.DayTimeIntervalType(),
        t.StructType([t.StructField("x", t.DoubleType())]),
        t.MapType(t.StringType(), t.DoubleType()),
    ],
)
def test_a_feature_that_is_no_number_is_refused_by_name_before_a_task_meets_it(kind: t.DataType) -> None:
    with pytest.raises(
        TypeError, match=r"features: column 'a' is .*; it must be a number, a boolean, an array of these"
    ):
        check_features(frame(a=kind, b=t.DoubleType()), {"a": (), "b": ()}, ["b", "a"])


def test_a_list_is_refused_where_the_model_was_trained_on_numbers_and_a_feature_that_is_missing() -> None:
    with pytest.raises(
        TypeError, match=r"column 'a' is array<double>, and the model was trained on rows of shape \(\)"
    ):
        check_features(frame(a=t.ArrayType(t.DoubleType())), {"a": ()}, ["a"])
    with pytest.raises(ValueError, match="features: there is no column 'b'; the DataFrame has a"):
        check_features(frame(a=t.DoubleType()), {"b": ()}, ["b"])


def test_a_feature_of_which_there_are_two_is_refused_by_name() -> None:
    twice = t.StructType([t.StructField("a", t.DoubleType()), t.StructField("a", t.DoubleType())])
    with pytest.raises(
        ValueError, match=r"features: 2 columns of the DataFrame are named 'a'.*rename or drop all but one"
    ):
        check_features(SimpleNamespace(schema=twice), {"a": ()}, ["a"])  # type: ignore[arg-type]


class Outputs(nn.Module):
    """Returns what a function makes of its one argument."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def scored(make: Any, model: TorchModel, *rows: float) -> dict[str, np.ndarray]:
    model.model = Outputs(make)
    scorer = model._scorer(model._finish(model._outputs()))
    return scorer({"x": np.array(rows or [1.0, 2.0], np.float32)})


def model_of(*outputs: str, widths: tuple[int, ...] = (0, 0), labels: tuple[str, ...] = ()) -> TorchModel:
    layout = Layout((Input(None, ("x",)),), labels, None, outputs)
    return TorchModel(featureCols=["x"], outputCols=list(outputs)).describe(layout=layout, widths=list(widths))


def test_outputs_keep_all_their_digits() -> None:
    def make(x: torch.Tensor) -> Any:
        return x.double() + 1_700_000_000, (x * 0 + 16_777_217).long(), x.bfloat16(), x > 1

    found = scored(make, model_of("time", "id", "half", "is", widths=(0,) * 4))
    assert found["time"].tolist() == [1_700_000_001.0, 1_700_000_002.0]
    assert (found["half"].tolist(), found["is"].tolist()) == ([1.0, 2.0], [0.0, 1.0])


def test_a_complex_output_is_an_error_that_says_which() -> None:
    with pytest.raises(ValueError, match=r"output 1 of the network is complex, .* return torch.view_as_real"):
        scored(lambda x: (x, torch.complex(x, x)), model_of("a", "b"))


def test_columns_of_a_dict_hold_the_outputs_of_their_names_whatever_their_order() -> None:
    def by_name(x: torch.Tensor) -> Any:
        return {"mean": x, "var": 10 * x}

    for labels in ((), ("mean", "var")):
        model = model_of("mean", "var", labels=labels).setOutputCols(["var", "mean"])
        found = scored(by_name, model)
        assert (found["mean"].tolist(), found["var"].tolist()) == ([1.0, 2.0], [10.0, 20.0])
        again = scored(by_name, model.copy({model.getParam("outputCols"): ["mean", "var"]}))
        assert (again["mean"].tolist(), list(again)) == ([1.0, 2.0], ["mean", "var"])
    renamed = scored(by_name, model_of("mean", "var").setOutputCols(["m", "v"]))
    assert (renamed["m"].tolist(), renamed["v"].tolist()) == ([1.0, 2.0], [10.0, 20.0])
    by_place = scored(lambda x: (x, 10 * x), model_of("mean", "var").setOutputCols(["var", "mean"]))
    assert by_place["var"].tolist() == [1.0, 2.0]


def test_an_order_that_does_not_tell_which_output_is_meant_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"\['var', 'other'\] give names of outputs to others: .* called \['mean', 'var'\]"
    ):
        scored(lambda x: {"mean": x, "var": x}, model_of("mean", "var").setOutputCols(["var", "other"]))
    by_place = scored(lambda x: (x, 10 * x), model_of("mean", "var").setOutputCols(["var", "other"]))
    assert by_place["var"].tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="names of outputs to outputs of other sizes"):
        model_of("mean", "var", widths=(0, 3)).setOutputCols(["var", "mean"])._check({})


@pytest.mark.parametrize("width", [0, 3])
def test_a_network_that_drops_the_dimension_of_a_single_row_is_given_it_back(width: int) -> None:
    def squeezed(x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(-1, max(width, 1)).squeeze()

    (one,) = scored(squeezed, model_of("y", widths=(width,)), 5.0).values()
    (two,) = scored(squeezed, model_of("y", widths=(width,)), 5.0, 6.0).values()
    assert one.tolist() == two.tolist()[:1]


def test_a_network_that_returns_other_rows_than_it_was_given_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"an output of shape \[4, 3\] for 2 rows, not \[2\] or \[2, …\]"):
        scored(lambda x: torch.zeros(4, 3), model_of("y", widths=(3,)))


@pytest.mark.parametrize("output", [torch.tensor(1.0), torch.zeros(0, 2)])
def test_an_output_without_a_row_for_each_row_is_an_error(output: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"output 1 of the network has the shape \[.*\]: it needs a row for each row"):
        widths_of([torch.zeros(2), output])


class Keeping(nn.Module):
    """Keeps what it computed at its first call, as networks do with the codes of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(1)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.arange(1.0, 1.0 + len(x))
        return self.weight * self.kept * x


def test_a_network_trains_on_with_what_it_keeps_of_a_prediction() -> None:
    net = Keeping()
    score = Scorer(net, Layout((Input(None, ("x",)),)), lambda outputs: {"y": outputs[0]})
    assert score({"x": np.array([1.0, 1.0])})["y"].tolist() == [1.0, 2.0]
    net(torch.ones(2)).sum().backward()
    assert net.weight.grad.item() == 3.0


def test_spark_takes_a_prediction_for_a_function_of_iterators_without_a_warning() -> None:
    scorer = Scorer(nn.Linear(3, 1), Layout((Input("x", ("x",)),)), list)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict = PredictionUdf(scorer, {"x": (3,)}, t.StructType([t.StructField("p", t.DoubleType())]), 8)
    assert predict._udf.evalType == PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF
