"""Converts the arguments that SQL passes to a registered model to those of the model's UDF, or refuses them by name.

SQL does not know the model's columns, so each task inspects the values that arrive; ``transform`` instead uses the schema.
"""

from __future__ import annotations

import decimal
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from spark_elastic.errors import DataError
from spark_elastic.estimator.row_numbers import RowCount

if TYPE_CHECKING:
    import pandas as pd

    # One argument, or several: numbers and arrays are Series, vectors are the fields of VectorUDT's struct.
    Arguments: TypeAlias = pd.Series | pd.DataFrame | tuple[pd.Series | pd.DataFrame, ...]

_VECTOR_FIELDS = ["type", "size", "indices", "values"]
_SPARSE = 0


def features_of(
    sql_name: str, shapes: Mapping[str, tuple[int, ...] | None]
) -> Callable[[Arguments], pd.Series | tuple[pd.Series, ...]]:
    """Return the function that makes a batch of features of a batch of SQL's arguments.

    shapes: the shape of one row of each feature, in the order of the arguments; None for lists of different lengths. It raises
    ``TypeError`` for a wrong number of arguments and for values of a wrong kind, and ``DataError`` for nulls and for arrays of a
    wrong length.
    """
    return functools.partial(_features, sql_name=sql_name, shapes=shapes, rows=RowCount())


def _features(
    batch: Arguments, sql_name: str, shapes: Mapping[str, tuple[int, ...] | None], rows: RowCount
) -> pd.Series | tuple[pd.Series, ...]:
    given = batch if isinstance(batch, tuple) else (batch,)
    if len(given) != len(shapes):
        raise TypeError(
            f"{sql_name}({', '.join(shapes)}) takes these {len(shapes)} features in this order, not {len(given)}"
        )
    name_row = rows.next(len(given[0]))
    found = tuple(
        _numbers(values, name) if shape == () else _lists(values, name, shape, name_row)
        for values, (name, shape) in zip(given, shapes.items(), strict=True)
    )
    return found if len(found) > 1 else found[0]


def _numbers(values: pd.Series | pd.DataFrame, name: str) -> pd.Series:
    """Return a feature of single numbers. Nulls become NaN, which is refused later with all other NaN."""
    if values.ndim > 1:
        raise TypeError(f"the model takes a number for {name!r}, not a vector or struct")
    if values.dtype != object:
        if values.dtype.kind not in "iufb":
            raise TypeError(f"the model takes a number for {name!r}, not {values.dtype}")
        return values
    for value in values:
        if value is not None and not isinstance(value, (numbers.Number, np.bool_, decimal.Decimal)):
            raise TypeError(f"the model takes a number for {name!r}, not {_kind(value)}")
    return values.astype(float)  # decimals, and columns with nulls


def _lists(
    values: pd.Series | pd.DataFrame, name: str, shape: tuple[int, ...] | None, name_row: Callable[[int], str]
) -> pd.Series:
    """Return a feature of arrays, each with as many numbers as the model takes."""
    import pandas as pd

    if values.ndim > 1:
        if list(values.columns) != _VECTOR_FIELDS:
            raise TypeError(f"the model takes an array of numbers or a vector for {name!r}, not a struct")
        values = pd.Series([_dense(*row) for row in values.itertuples(index=False)], dtype=object)
    if values.dtype != object:
        raise TypeError(f"the model takes an array of numbers or a vector for {name!r}, not a number")
    width = None if shape is None else math.prod(shape)
    return pd.Series(
        [_list(value, name, width, functools.partial(name_row, place)) for place, value in enumerate(values)],
        dtype=object,
    )


def _list(value: object, name: str, width: int | None, row: Callable[[], str]) -> np.ndarray:
    if value is None:
        raise DataError(f"column {name!r} is null in {row()}; fill such values or drop the rows")
    found = np.frombuffer(value, np.uint8).astype(np.int16) if isinstance(value, bytes) else np.asarray(value)
    if found.dtype.kind == "O" and all(isinstance(each, decimal.Decimal) for each in found):
        found = found.astype(np.float64)
    if found.dtype.kind == "O" and any(each is None for each in found):
        raise DataError(f"column {name!r} has a null in {row()}; fill such values or drop the rows")
    if found.dtype.kind not in "iufb":
        raise TypeError(f"the model takes an array of numbers or a vector for {name!r}, not {_kind(value)}")
    if width is not None and len(found) != width:
        raise DataError(f"column {name!r} has {len(found)} values, where the model takes {width}, in {row()}")
    return found


def _dense(kind: float | None, size: float | None, indices: np.ndarray | None, values: np.ndarray | None) -> object:
    """Return the numbers of a Spark ML vector from the fields of its struct; None for null."""
    if values is None or kind is None:
        return None
    if kind != _SPARSE:
        return np.asarray(values, np.float32)
    assert size is not None
    found = np.zeros(int(size), np.float32)
    found[indices] = values
    return found


def _kind(value: object) -> str:
    if isinstance(value, str):
        return "a string; StringIndexer makes numbers of strings"
    if isinstance(value, (list, np.ndarray)) and len(value):
        inner = value[0]
        if isinstance(inner, str):
            return "an array of strings"
        if isinstance(inner, (list, np.ndarray)):
            return "an array of arrays; flatten() makes one array of its arrays, which the network can reshape"
    return "an array" if isinstance(value, (list, np.ndarray)) else f"a {type(value).__name__}"
