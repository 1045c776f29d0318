"""Turns Arrow columns into numpy columns, and says which columns can be converted.

Numbers, bools and dictionaries of them become [rows]; fixed-size lists, tensors and lists of one length [rows, …]; other lists
become ``Ragged``; Spark ML's vectors are lists. Lists in fixed-size lists must have one length: [rows, n, length]. Strings,
bytes, times, decimals, other structs, maps and other lists of lists have no tensor, and neither has what contains them: they are
left out unless a ``transform`` makes numbers of them. A null is an error, also in a list: no number stands for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch

from spark_elastic.data.columns import Column, Ragged, as_ragged
from spark_elastic.data.vectors import is_vector, unpack
from spark_elastic.errors import DataError

# Making a nested tensor logs a hint for developers of torch, once in every process.
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in record.getMessage())


def convertible(kind: pa.DataType) -> bool:
    """Return whether columns of this Arrow type become tensors."""
    if pa.types.is_dictionary(kind) or pa.types.is_fixed_size_list(kind) or isinstance(kind, pa.FixedShapeTensorType):
        return convertible(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_number(kind.value_type)
    return _is_number(kind) or is_vector(kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def to_column(array: pa.Array | pa.ChunkedArray, name: str, where: str) -> Column:
    """Convert one column. name, where: for messages. Raises DataError on nulls and types without a tensor."""
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
    if array.null_count:
        raise DataError(
            f"{where}: column {name!r} has {array.null_count} nulls; "
            "fill them with transform= or drop them with filters="
        )
    kind = array.type
    if not convertible(kind):
        raise DataError(f"{where}: column {name!r} is {kind}, which cannot be made into a tensor; give a transform=")
    if isinstance(kind, pa.FixedShapeTensorType):
        values = to_column(array.storage.flatten(), name, where)
        assert isinstance(values, np.ndarray)
        try:
            return shaped(values, kind)
        except ValueError as failure:
            raise DataError(f"{where}: column {name!r} {failure}") from failure
    if pa.types.is_dictionary(kind):
        return to_column(array.dictionary_decode(), name, where)
    if pa.types.is_fixed_size_list(kind):
        values = to_column(array.flatten(), name, where)
        if isinstance(values, Ragged):
            raise DataError(
                f"{where}: column {name!r} has lists of different lengths in its fixed-size lists; "
                "make them equally long with transform=, or leave the column out with columns="
            )
        return values.reshape(len(array), kind.list_size, *values.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        values = to_column(array.flatten(), name, where)
        assert isinstance(values, np.ndarray)
        offsets = np.asarray(array.offsets.to_numpy(), np.int64)
        return _dense_if_even(Ragged(values, offsets[:-1] - offsets[0], np.diff(offsets)))
    if is_vector(kind):
        try:
            return _dense_if_even(unpack(array))
        except (ValueError, IndexError) as failure:
            raise DataError(f"{where}: column {name!r} has vectors that Spark ML cannot read: {failure}") from failure
    return np.asarray(array.to_numpy(zero_copy_only=False))


def shaped(values: np.ndarray, kind: pa.FixedShapeTensorType) -> np.ndarray:
    """Return the values of Arrow's fixed-shape tensors as [rows, …], with the dimensions in their logical order.

    Raises ValueError for a permutation that is not its own inverse: pyarrow writes it in one sense and reads it in the other.
    """
    stored = values.reshape(-1, *kind.shape)
    order = list(kind.permutation or range(len(kind.shape)))
    if [order.index(axis) for axis in range(len(order))] != order:
        raise ValueError(
            f"has tensors whose dimensions are in the order {order}; write them in the order of their memory"
        )
    logical: np.ndarray = stored.transpose(0, *(axis + 1 for axis in order))
    return logical


def _dense_if_even(lists: Ragged) -> Column:
    """Return lists, whose values have to be consecutive, as [rows, n] if all have one length."""
    if len(lists) and lists.is_even:
        return lists.values.reshape(len(lists), int(lists.lengths[0]))
    return lists


def from_transform(result: object, rows: int, where: str) -> dict[str, Column]:
    """Convert the result of a user's transform: a Table, a RecordBatch, or a mapping of names to arrays or tensors.

    Columns of an Arrow result that cannot become tensors are left out. Raises DataError if the number of rows has changed.
    """
    if isinstance(result, (pa.Table, pa.RecordBatch)):
        if result.num_rows != rows:
            raise DataError(f"{where}: transform returned {result.num_rows} rows for {rows}; it must keep all rows")
        return {
            field.name: _as_made(result.column(i), field.name, where)
            for i, field in enumerate(result.schema)
            if convertible(field.type)
        }
    if not isinstance(result, Mapping):
        kind = type(result).__name__
        raise DataError(f"{where}: transform must return a pyarrow.Table or a dict of arrays, not {kind}")
    columns: dict[str, Column] = {}
    for name, value in result.items():
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            column = _as_made(value, name, where)
        else:
            # Copied, because a transform may return the same memory again, with the rows that it is called with next.
            column = np.array(_of_numbers(value, f"{where}: transform made column {name!r} of"))
        if isinstance(column, np.ndarray) and not column.ndim:
            raise DataError(f"{where}: transform made column {name!r} of one value for {rows} rows")
        if len(column) != rows:
            raise DataError(
                f"{where}: transform returned {len(column)} rows in {name!r} for {rows}; it must keep all rows"
            )
        columns[name] = column
    return columns


def _as_made(array: pa.Array | pa.ChunkedArray, name: str, where: str) -> Column:
    """Convert Arrow's column as a transform has made it: its lists stay lists, even if all of these rows have one length."""
    column = to_column(array, name, where)
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    return as_ragged(column) if is_list and isinstance(column, np.ndarray) and column.ndim == 2 else column


def _of_numbers(value: object, what: str) -> np.ndarray:
    """Return an array or tensor as an array that can become a tensor. what: the beginning of the DataError otherwise."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise DataError(f"{what} an array that masks {int(np.ma.getmaskarray(value).sum())} values: fill them")
    try:
        column = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
        if column.dtype.kind in "biuf":
            torch.from_numpy(np.empty(0, column.dtype))
            return column
    except (TypeError, ValueError, RuntimeError) as failure:
        kind = getattr(value, "dtype", type(value).__name__)
        raise DataError(f"{what} {kind}, which cannot be made into an array of numbers: {failure}") from failure
    raise DataError(f"{what} dtype {column.dtype}, not of numbers")


def to_tensors(column: torch.Tensor | Ragged, sizes: list[int], *, jagged: bool, pinned: bool) -> list[torch.Tensor]:
    """Cut a column into one tensor for each batch of ``sizes`` rows.

    Lists become a dense [rows, n] tensor if all of a batch have one length, unless ``jagged`` says that lengths differ in
    general; otherwise a nested tensor of jagged layout. Dense columns are not copied. With ``pinned`` they must already be in
    pinned memory, as views of a tensor from torch's allocator, which then knows when a copy to the GPU still reads from it.
    """
    if isinstance(column, torch.Tensor):
        if not jagged:
            return list(column.split_with_sizes(sizes))
        column = as_ragged(column.numpy())
    tensors, start = [], 0
    for size in sizes:
        part = column.take(np.arange(start, start + size, dtype=np.int64))
        start += size
        values = torch.from_numpy(part.values)
        values = values.pin_memory() if pinned else values
        if not jagged and part.is_even:
            tensors.append(values.reshape(size, int(part.lengths[0])))
        else:
            offsets = torch.from_numpy(np.append(part.starts, len(part.values)))
            tensors.append(jagged_tensor(values, offsets))
    return tensors


def jagged_tensor(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows of different lengths as a nested tensor; row r is ``values[offsets[r] : offsets[r + 1]]``."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)
