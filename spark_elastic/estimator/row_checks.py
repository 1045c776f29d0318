"""Finds values that training rows must not have: NaN, infinity, class labels with fractions, weights below 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_elastic.data import ParquetLoader
from spark_elastic.errors import DataError
from spark_elastic.estimator.finite import check_finite

# Fractional columns reach the network as 32-bit floats, which distinguish whole numbers up to this one.
FLOAT_INDEXES = 2**24
# The largest weight of a row lies between these, so that sums of weights, and losses times weights, are 32-bit floats.
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30


def check_rows(batch: dict[str, torch.Tensor], names: Sequence[str], loader: ParquetLoader) -> None:
    """Remove the row ids from the batch. Raises ``DataError`` for NaN and infinity, naming column and row."""
    groups, rows = batch.pop("_row_group"), batch.pop("_row")
    check_finite(batch, names, lambda place: f"row {int(rows[place])} of {loader.manifest.where(int(groups[place]))}")


def check_classes(batch: Mapping[str, torch.Tensor], names: Sequence[str], classes: int | None = None) -> None:
    """Raise ``DataError`` for fractions, and with ``classes`` for labels that are not classes, in these columns."""
    for name in names:
        values = batch[name]
        if values.dim() == 1 and values.is_floating_point() and bool((found := values % 1 != 0).any()):
            raise DataError(not_a_class(name, float(values[found][0])))
        if classes is not None and bool(((values < 0) | (values >= classes)).any()):
            raise DataError(not_in_classes(name, float(values.min()), float(values.max()), classes))


def not_in_classes(name: str, least: float, most: float, classes: int) -> str:
    """Return the message for labels that are not classes of a classifier."""
    found = f"labelCol: column {name!r} has labels from {least:g} to {most:g}"
    return f"{found}; with {classes} classes they go from 0 to {classes - 1}"


def check_indexes(batch: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Raise ``DataError`` for a number that cannot be a category index, naming column and value."""
    for name in names:
        values = batch[name]
        if bool((bad := (values < 0) | (values % 1 != 0)).any()):
            raise DataError(not_an_index(name, float(values[bad][0])))
        if values.is_floating_point() and bool((values >= FLOAT_INDEXES).any()):
            raise DataError(merged_index(name, float(values.max())))


def check_whole(batch: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Raise ``DataError`` for values that are not exact whole numbers, naming column and value."""
    for name in names:
        values = batch[name].values() if batch[name].is_nested else batch[name]
        if not values.is_floating_point():
            continue
        if bool((found := values % 1 != 0).any()):
            raise DataError(not_whole(name, float(values[found][0])))
        if values.dtype != torch.float64 and bool((found := values.abs() >= FLOAT_INDEXES).any()):
            raise DataError(merged_index(name, float(values[found][0]), "inputs"))


def check_weights(batch: Mapping[str, torch.Tensor], name: str | None) -> None:
    """Raise ``DataError`` for a weight below 0 or one that is too large, naming column and value."""
    if name is not None and len(batch[name]):
        least, most = map(float, batch[name].aminmax())
        if least < 0:
            raise DataError(negative_weight(name, least))
        if most > MOST_WEIGHT:
            raise DataError(weights_out_of_range(name, most))


def negative_weight(name: str, least: float) -> str:
    """Return the message for a column with weights below 0."""
    return f"weightCol: column {name!r} has weights below 0, down to {least:g}"


def refused_weights(name: str, facts: Mapping[str, Any]) -> str:
    """Say what is wrong with the weights of a column, of which the facts are known; an empty string if nothing is."""
    if facts["min"] < 0:
        return negative_weight(name, facts["min"])
    if facts["max"] == 0:
        return f"weightCol: all weights of column {name!r} are 0; give some rows a weight above 0"
    return "" if LEAST_WEIGHT <= facts["max"] <= MOST_WEIGHT else weights_out_of_range(name, facts["max"])


def weights_out_of_range(name: str, most: float) -> str:
    """Return the message for a column whose largest weight is too small or too large for sums of weights."""
    return (
        f"weightCol: the largest weight of column {name!r} is {most:g}, and sums of such weights leave the range of 32-bit "
        f"floats: multiply all weights by a number that brings it to between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, which changes "
        "nothing else"
    )


def not_an_index(name: str, value: float) -> str:
    """Return the message for a number that is not a category index."""
    return (
        f"categoricalCols: column {name!r} has the index {value:g}; indexes of categories are whole numbers from 0 on, as "
        "StringIndexer makes them"
    )


def not_whole(name: str, value: float) -> str:
    """Return the message for a fraction if the network takes whole numbers."""
    return (
        f"column {name!r} has the value {value:g}, and the network takes whole numbers there: inputs= says int64, or it was "
        "trained on a column of whole numbers"
    )


def merged_index(name: str, value: float, role: str = "categoricalCols") -> str:
    """Return the message for an index of a fractional type that is too large to be distinguished from its neighbours."""
    return (
        f"{role}: column {name!r} has the index {value:.0f} in a column of fractional numbers, which are kept as 32-bit "
        f"floats: from {FLOAT_INDEXES} on these merge indexes; cast the column to long"
    )


def not_a_class(name: str, value: float) -> str:
    """Return the message for a label that is not a class index."""
    return f"column {name!r} has the label {value:g}; the loss takes class indexes, which are whole numbers from 0 on"
