"""Determines what fit would know about a network that was trained elsewhere: how it takes columns, and what it returns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegralType, StructField

from spark_elastic.estimator.expectations import with_graph
from spark_elastic.estimator.frame import as_list, check_columns, column, row_shape
from spark_elastic.estimator.layout import Layout, outputs_of
from spark_elastic.estimator.preflight import ROWS, try_layouts, widths_of
from spark_elastic.estimator.recipe import own_randomness

if TYPE_CHECKING:
    from spark_elastic.estimator.model import ElasticModel


def describe_from_frame(model: ElasticModel, layout: Layout, frame: DataFrame) -> None:
    """Set a model's layout, shapes and widths by calling its network on a few rows of the shapes of the DataFrame's features.

    Reads a few rows if the schema does not say how long lists are. Raises ValueError if the network cannot be called, and
    if these rows would have to be read from a streaming DataFrame.
    """
    assert model.model is not None
    schema = frame.schema
    check_columns(schema, layout.features, "features")
    fields = {name: schema[name] for name in layout.features}
    sizes = _sizes(frame, fields)
    with own_randomness(0):
        batch = {name: _made_up(field.dataType, sizes[name]) for name, field in fields.items()}
        outputs, layout, _ = try_layouts(with_graph(model.model), layout, batch)
        layout = layout.settled(batch)  # for rows of other types, as after a fit
    shapes = {name: None if values.is_nested else tuple(values.shape[1:]) for name, values in batch.items()}
    found = outputs_of(outputs, layout)
    model.describe(layout=layout, shapes=shapes, widths=widths_of(found))._take_for_probabilities(found)


def _sizes(frame: DataFrame, fields: Mapping[str, StructField]) -> dict[str, list[int]]:
    """Return how many numbers the first rows have in each column; an empty list for a column of single numbers."""
    shapes = {name: row_shape(field) for name, field in fields.items()}
    found = {name: list(shape or ()) for name, shape in shapes.items()}
    unknown = [name for name, shape in shapes.items() if shape is None]
    if not unknown:
        return found
    if frame.isStreaming:
        raise ValueError(
            f"transform a batch DataFrame first: the length of the lists in column {unknown[0]!r} is not known, and no rows of a "
            "streaming one can be read to find it"
        )
    lists = [as_list(name, fields[name].dataType) for name in unknown]
    # The size of a null is -1 or null, depending on Spark's settings.
    sizes = (f.when(column(name).isNotNull(), f.size(value)) for name, value in zip(unknown, lists, strict=True))
    rows = frame.select(*sizes).limit(ROWS).collect()
    for place, name in enumerate(unknown):
        found[name] = [row[place] for row in rows if row[place] is not None]
        if not found[name]:
            raise ValueError(
                f"column {name!r} has no list in the first {len(rows)} rows, so that the length of its lists is unknown; first "
                "transform a DataFrame that has some"
            )
    return found


def _made_up(kind: DataType, sizes: Sequence[int]) -> torch.Tensor:
    """Return rows of numbers below 1, which no network takes for an index of many, and zeros in columns of whole numbers."""
    is_whole = isinstance(kind.elementType if isinstance(kind, ArrayType) else kind, (IntegralType, BinaryType))
    dtype = torch.int64 if is_whole else torch.float32
    if len(set(sizes)) <= 1:
        return torch.rand((ROWS, *sizes[:1])).to(dtype)
    rows = [torch.rand(size).to(dtype) for size in itertools.islice(itertools.cycle(sizes), ROWS)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)
