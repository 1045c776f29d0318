"""Spark ML's vectors as Spark writes them to Parquet: a struct of type (0 sparse, 1 dense), size, indices and values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from spark_elastic.data.columns import Ragged

_FIELDS = {"type": pa.int8(), "size": pa.int32(), "indices": pa.int32(), "values": pa.float64()}
_DENSE = 1


def is_vector(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is that of Spark ML's vectors."""
    if not pa.types.is_struct(kind):
        return False
    types = {field.name: field.type for field in kind}
    return {name: type.value_type if pa.types.is_list(type) else type for name, type in types.items()} == _FIELDS


def unpack(array: pa.StructArray) -> Ragged:
    """Return vectors without nulls as lists of float64, with the zeros of sparse vectors filled in."""
    kinds, sizes, indices, values = (array.field(name) for name in _FIELDS)
    counts = np.diff(values.offsets.to_numpy())
    is_dense = kinds.to_numpy() == _DENSE
    lengths = np.where(is_dense, counts, sizes.fill_null(0).to_numpy()).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places[np.repeat(~is_dense, counts)] = indices.flatten().to_numpy()
    filled = np.zeros(lengths.sum())
    filled[np.repeat(starts, counts) + places] = values.flatten().to_numpy()
    return Ragged(filled, starts, lengths)
