"""Finds NaN, infinity and nulls in numeric columns, and names the column and the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from spark_elastic.errors import DataError

# How many values of a row are shown to help users find it.
SHOWN = 6

# Columns of at most this many values are checked together.
FEW = 10_000

# A column of a batch: a tensor, jagged or not, an array, or an array for each row.
Values = torch.Tensor | np.ndarray | Sequence[np.ndarray]


def check_finite(
    columns: Mapping[str, Values], names: Sequence[str], where: Callable[[int], str], others: Sequence[str] = ()
) -> None:
    """Raise ``DataError`` for a value that is not a finite number, naming its column and the first such row.

    columns: [rows, …] tensors, which may be jagged, or arrays, or lists of arrays. where: returns the name of the row at a
    position. others: further columns whose values in that row are shown.
    """
    narrow = {name: few for name in names if (few := _few_of(columns[name])) is not None}
    if narrow and bool(torch.cat(list(narrow.values())).isfinite().all()):
        names = [name for name in names if name not in narrow]
    for name in names:
        place = _first_bad(columns[name])
        if place is None:
            continue
        values = _row(columns[name], place)
        bad = values[~np.isfinite(values)] if values.dtype != object else np.array([np.nan])
        word = "an infinite value" if np.isinf(bad).any() else "NaN or a null"
        shown = [f"{other}={_short(_row(columns[other], place))}" for other in [*names, *others] if other in columns]
        raise DataError(
            f"column {name!r} has {word} in {where(place)} ({', '.join(shown[:SHOWN])}); fill such values (Imputer, fillna) or "
            "drop the rows"
        )


def _few_of(values: Values) -> torch.Tensor | None:
    """Return a column's numbers if they are so few that a check of their own would cost more overhead than work."""
    if not isinstance(values, torch.Tensor) or values.is_nested or not values.is_floating_point():
        return None
    return values.reshape(-1) if values.numel() <= FEW else None


def _first_bad(values: Values) -> int | None:
    """Return the position of the first row with a non-finite value; None if all are finite, the usual case."""
    if isinstance(values, torch.Tensor) and values.is_nested:
        flat = values.values()
        if not flat.is_floating_point() or bool(flat.isfinite().all()):
            return None
        first = int((~flat.isfinite().reshape(len(flat), -1).all(1)).nonzero()[0])
        return int(torch.searchsorted(values.offsets(), first, right=True)) - 1  # type: ignore[attr-defined]
    if isinstance(values, torch.Tensor):
        if not values.is_floating_point() or bool(values.isfinite().all()):
            return None
        return int((~values.isfinite().reshape(len(values), -1).all(1)).nonzero()[0])
    if isinstance(values, np.ndarray) and values.dtype != object:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return None
        return int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(1)))
    return next((place for place, row in enumerate(values) if not _is_finite(row)), None)


def _is_finite(row: object) -> bool:
    array = np.asarray(row)
    if array.dtype == object:
        return all(entry is not None and _is_finite(entry) for entry in array.reshape(-1)) if array.ndim else False
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _row(values: Values, place: int) -> np.ndarray:
    row = values[place]
    return np.asarray(row.numpy(force=True) if isinstance(row, torch.Tensor) else row).reshape(-1)


def _short(row: np.ndarray) -> str:
    shown = ", ".join(f"{entry:g}" if isinstance(entry, (float, np.floating)) else str(entry) for entry in row[:4])
    return shown if len(row) == 1 else f"[{shown}{', …' if len(row) > 4 else ''}]"
