"""Class weights: turns the Param ``classWeights`` into weights of a network's classes and of a batch's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from spark_elastic.errors import DataError
from spark_elastic.estimator.plan import DataPlan
from spark_elastic.estimator.row_checks import check_classes

# How many labels are read and counted at a time.
ROWS = 65_536


def weights_of_classes(
    wanted: str | Sequence[float] | Mapping[int, float], classes: int, count: Callable[[], Sequence[int]]
) -> tuple[float, ...]:
    """Return the weight of each class from 0 on. ``count`` returns how many rows each class has, for "balanced".

    Classes that a dict does not name have the weight 1. "balanced" gives all occurring classes the same total weight, and rows
    an average weight of 1, as scikit-learn does. Raises ValueError if the weights do not fit the number of classes.
    """
    if isinstance(wanted, str):
        counts = count()
        present = sum(bool(rows) for rows in counts)
        return tuple(sum(counts) / (present * rows) if rows else 1.0 for rows in counts)
    if isinstance(wanted, Mapping):
        unknown = sorted(label for label in wanted if label >= classes)
        if unknown:
            raise ValueError(f"classWeights: there is no class {unknown[0]}; {_known(classes)}")
        return tuple(wanted.get(label, 1.0) for label in range(classes))
    if len(wanted) != classes:
        raise ValueError(f"classWeights must have one number for each of {classes} classes, not {list(wanted)}")
    return tuple(wanted)


def count_classes(column: str, data: DataPlan, classes: int) -> list[int]:
    """Count the training rows of each class by reading the label column. Raises ``DataError`` for other labels."""
    counts = torch.zeros(classes, dtype=torch.int64)
    loader = data.open(
        data.training_url, batch_size=ROWS, columns=[column], shuffle=False, pin_memory=False, with_row_ids=False
    )
    try:
        for batch in loader:
            check_classes(batch, [column])
            counts += torch.bincount(class_of_rows(batch[column], column, classes), minlength=classes)
    finally:
        loader.close()
    found: list[int] = counts.tolist()
    return found


def class_of_rows(labels: torch.Tensor, column: str, classes: int) -> torch.Tensor:
    """Return the labels as class indexes [rows]. Raises ``DataError`` for a label that is not one of the classes."""
    found = labels.flatten()
    strange = found[(found < 0) | (found >= classes)]
    if len(strange):
        raise DataError(f"classWeights: column {column!r} has the label {strange[0].item():g}; {_known(classes)}")
    return found.long()


def _known(classes: int) -> str:
    return f"the network has the {classes} classes from 0 to {classes - 1}"
