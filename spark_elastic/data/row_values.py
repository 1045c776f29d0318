"""Converts the rows of an Arrow table to Python values: NumPy numbers, arrays, strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from spark_elastic.data.convert import shaped
from spark_elastic.errors import DataError

Values = Callable[[pa.Array, str, str], Sequence[object]]


def column_values(column: pa.Array, name: str, where: str) -> Sequence[object]:
    """Return a column's values. A null is None, or NaN in a column of fractional numbers; times are datetime64[ns].

    Raises DataError, which names column and row group, for a time that these do not reach.
    """
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        rows = iter(shaped(np.asarray(column.storage.flatten()), kind))
        return [next(rows) if valid else None for valid in column.is_valid().to_pylist()]
    if pa.types.is_timestamp(kind):
        try:
            return times_of(column.cast(pa.timestamp("ns")), "ns")
        except pa.ArrowInvalid as failure:
            raise DataError(
                f"{where}: column {name!r} cannot be given to a predicate, whose datetime64[ns] reach from 1678 to 2262; "
                f"filters= takes any time: {failure}"
            ) from failure
    if pa.types.is_floating(kind) or (
        (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and not column.null_count
    ):
        return list(column.to_numpy(zero_copy_only=False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [item.values.to_numpy(zero_copy_only=False) if item.is_valid else None for item in column]
    return list(column.to_pylist())


def times_of(column: pa.Array, unit: str) -> list[np.datetime64 | None]:
    """Return the values of a column of timestamps or dates as datetime64 of a unit, and None for a null."""
    times = column.to_numpy(zero_copy_only=False).astype(f"M8[{unit}]")
    return [time if valid else None for time, valid in zip(times, column.is_valid().to_pylist(), strict=True)]


def row_values(table: pa.Table, where: str, values: Values = column_values) -> Iterator[dict[str, object]]:
    """Convert a table's columns by ``values(column, name, where)``, and return an iterator over its rows as dicts."""
    names = table.column_names
    columns = [values(whole(column), name, where) for name, column in zip(names, table.columns, strict=True)]
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # older releases of pyarrow combine extension types to this
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column
