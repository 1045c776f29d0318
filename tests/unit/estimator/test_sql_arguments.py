"""What SQL hands to a registered model: vectors become arrays, and what the model cannot take is refused by name."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest

from spark_elastic.errors import DataError
from spark_elastic.estimator.sql_arguments import features_of

VECTORS = pd.DataFrame(
    [(1, None, None, np.array([1.0, 2.0, 3.0])), (0, 3, np.array([0, 2]), np.array([4.0, 5.0]))],
    columns=["type", "size", "indices", "values"],
)


def taken(shapes: dict[str, tuple[int, ...] | None], *arguments: Any) -> list[Any]:
    """What the UDF gets of one batch of arguments, as lists."""
    found = features_of("score", shapes)(arguments if len(arguments) > 1 else arguments[0])
    every = found if isinstance(found, tuple) else (found,)
    return [[value.tolist() if isinstance(value, np.ndarray) else value for value in series] for series in every]


def lists(*values: Any) -> pd.Series:
    return pd.Series([None if value is None else np.array(value) for value in values], dtype=object)


def test_vectors_dense_and_sparse_become_arrays() -> None:
    assert taken({"x": (3,)}, VECTORS) == [[[1.0, 2.0, 3.0], [4.0, 0.0, 5.0]]]


def test_an_array_of_decimals_is_one_of_numbers() -> None:
    assert taken({"x": (2,)}, lists([Decimal("1.5"), Decimal(2)])) == [[[1.5, 2.0]]]


def test_numbers_arrays_and_bytes_arrive_as_transform_gives_them() -> None:
    numbers, decimals = pd.Series([1, 2]), pd.Series([Decimal("1.5"), None], dtype=object)
    found = taken(
        {"a": (), "b": (), "x": (2,), "ragged": None, "code": (2,)},
        numbers,
        decimals,
        lists([1.0, 2.0], [3.0, 4.0]),
        lists([1], [2, 3]),
        pd.Series([b"\x00\xff", b"ab"], dtype=object),
    )
    assert str(found[1]) == "[1.5, nan]"
    assert [found[0], *found[2:]] == [[1, 2], [[1.0, 2.0], [3.0, 4.0]], [[1], [2, 3]], [[0, 255], [97, 98]]]


@pytest.mark.parametrize(
    ("shapes", "arguments", "error", "words"),
    [
        (
            {"a": (), "x": (3,)},
            [pd.Series([1.0])],
            TypeError,
            r"score\(a, x\) takes these 2 features in this order, not 1",
        ),
        ({"a": ()}, [VECTORS], TypeError, "a number for 'a', not a vector"),
        ({"a": ()}, [pd.Series(["x"])], TypeError, "a number for 'a', not a string; StringIndexer"),
        ({"a": ()}, [lists([1.0])], TypeError, "a number for 'a', not an array"),
        ({"a": ()}, [pd.Series([None, datetime.date(2020, 1, 1)])], TypeError, "a number for 'a', not a date"),
        ({"a": ()}, [pd.Series([{"k": 1}])], TypeError, "a number for 'a', not a dict"),
        ({"a": ()}, [pd.to_datetime(pd.Series(["2020-01-01"]))], TypeError, r"a number for 'a', not datetime64\[\w+\]"),
        ({"x": (3,)}, [pd.Series([1.0])], TypeError, "a vector for 'x', not a number"),
        ({"x": (3,)}, [pd.DataFrame({"u": [1], "v": [2]})], TypeError, "a vector for 'x', not a struct"),
        ({"x": (3,)}, [pd.Series(["x"])], TypeError, "a vector for 'x', not a string"),
        ({"x": (3,)}, [lists(["a", "b", "c"])], TypeError, "a vector for 'x', not an array of strings"),
        (
            {"x": (4,)},
            [pd.Series([np.array([np.ones(2), np.ones(3)], dtype=object)])],
            TypeError,
            r"array of arrays; flatten\(\) makes one",
        ),
        ({"x": (2,)}, [lists([1.0, 2.0], None)], DataError, "column 'x' is null in row 1; fill such values"),
        ({"x": (2,)}, [lists([1, 2], [1, None])], DataError, "column 'x' has a null in row 1; fill such values"),
        ({"x": (2,)}, [lists([1.0, 2.0], [1.0])], DataError, "'x' has 1 values, where the model takes 2, in row 1"),
        ({"x": (2,)}, [VECTORS], DataError, "'x' has 3 values, where the model takes 2, in row 0"),
    ],
)
def test_what_the_model_cannot_take_is_refused_by_name(
    shapes: dict[str, Any], arguments: list[Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        taken(shapes, *arguments)


def test_a_null_among_vectors_is_a_null() -> None:
    frame = pd.DataFrame([*VECTORS.itertuples(index=False), (None,) * 4], columns=VECTORS.columns)
    with pytest.raises(DataError, match="column 'x' is null in row 2"):
        taken({"x": (3,)}, frame)
