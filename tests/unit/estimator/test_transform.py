"""What a model's transform finds out of a DataFrame's columns before Spark begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types as t

from spark_elastic.estimator.transform import check_features


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
