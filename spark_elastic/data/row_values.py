"""Converts the rows of an Arrow table to Python values: NumPy numbers, arrays, strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from spark_elastic.data.convert import shaped


def row_values(table: pa.Table) -> Iterator[dict[str, object]]:
    """Yield each row as a dict. A null is None, or NaN in a column of fractional numbers; times are datetime64[ns]."""
    columns = [_values(column.combine_chunks()) for column in table.columns]
    for row in zip(*columns, strict=True):
        yield dict(zip(table.column_names, row, strict=True))


def _values(column: pa.Array | pa.ChunkedArray) -> Sequence[object]:
    if isinstance(column, pa.ChunkedArray):  # older releases of pyarrow combine extension types to this
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        rows = iter(shaped(np.asarray(column.storage.flatten()), kind))
        return [next(rows) if valid else None for valid in column.is_valid().to_pylist()]
    if pa.types.is_timestamp(kind):
        return list(column.cast(pa.timestamp("ns")).to_numpy(zero_copy_only=False))
    if pa.types.is_floating(kind) or (
        (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and not column.null_count
    ):
        return list(column.to_numpy(zero_copy_only=False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [item.values.to_numpy(zero_copy_only=False) if item.is_valid else None for item in column]
    if pa.types.is_struct(kind) and [field.name for field in kind] == ["data", "shape"]:
        return [_shaped(item) if item.is_valid else None for item in column]
    return list(column.to_pylist())


def _shaped(item: pa.StructScalar) -> np.ndarray:
    """Return an array from the struct by which Petastorm's ``Decoder`` represents arrays of several shapes."""
    values: np.ndarray = item["data"].values.to_numpy(zero_copy_only=False)
    shaped: np.ndarray = values.reshape(item["shape"].as_py())
    return shaped
