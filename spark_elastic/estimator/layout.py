"""Turns the columns of a batch into a model's arguments. It handles only tensors, so fit and transform share the code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from spark_elastic.errors import DataError

DTYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}


@dataclass(frozen=True)
class Input:
    """One argument of ``forward``.

    name: its keyword; None for a positional argument, which leaves a single column unchanged: scalars are [rows].
    columns: its columns. Several are put side by side, as is the single column of a keyword argument: scalars are [rows, 1].
    dtype: a key of ``DTYPES``; None makes whole numbers int64 and everything else float32.
    expand: whether a positional scalar is passed as [rows, 1], for models that expect a matrix.
    categorical: whether the columns hold category indexes, passed side by side as one positional argument [rows, columns].
    """

    name: str | None
    columns: tuple[str, ...]
    dtype: str | None = None
    expand: bool = False
    categorical: bool = False

    def tensor(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the argument: [rows], [rows, …] or a nested tensor."""
        # Convert each column by itself, because whole numbers beside fractional ones would go through float32.
        parts = [
            plain(batch[column]) if self.dtype is None else batch[column].to(DTYPES[self.dtype])
            for column in self.columns
        ]
        if (self.name is not None or self.expand or self.categorical) and not any(part.is_nested for part in parts):
            parts = [part.unsqueeze(1) if part.dim() == 1 else part for part in parts]
        return parts[0] if len(parts) == 1 else _side_by_side(self, parts)

    def row_shape(self, shapes: Mapping[str, tuple[int, ...] | None]) -> tuple[int, ...] | None:
        """Return the shape of a row of the argument, given its columns' shapes; None for lists of different lengths."""
        batch = {}
        for column in self.columns:
            shape = shapes.get(column)
            if shape is None:
                return None
            batch[column] = torch.zeros((1, *shape))
        return tuple(self.tensor(batch).shape[1:])


@dataclass(frozen=True)
class Layout:
    """The roles of a dataset's columns.

    outputs: the columns that ``transform`` makes from the network's outputs, if outputs may be named after them.
    """

    inputs: tuple[Input, ...]
    labels: tuple[str, ...] = ()
    weight: str | None = None
    outputs: tuple[str, ...] = ()

    @property
    def features(self) -> list[str]:
        """The columns that the model needs, without duplicates."""
        return unique(column for entry in self.inputs for column in entry.columns)

    @property
    def categories(self) -> list[str]:
        """The columns that hold category indexes."""
        return [column for entry in self.inputs if entry.categorical for column in entry.columns]

    @property
    def columns(self) -> list[str]:
        """The columns that training needs, without duplicates."""
        return unique([*self.features, *self.labels, *([self.weight] if self.weight else [])])

    @property
    def whole(self) -> list[str]:
        """The columns of whole numbers that are not categories, without duplicates."""
        entries = [entry for entry in self.inputs if entry.dtype == "int64" and not entry.categorical]
        return unique(column for entry in entries for column in entry.columns)

    @property
    def described(self) -> list[str]:
        """The columns of which fits have to know more than that all values are finite: their extremes, and fractions."""
        return unique([*self.labels, *([self.weight] if self.weight else []), *self.categories, *self.whole])

    def settled(self, batch: Mapping[str, torch.Tensor]) -> Layout:
        """Return the layout with each argument's dtype fixed as for this batch, for batches whose columns have other types."""
        return replace(self, inputs=tuple(_settled(entry, batch) for entry in self.inputs))

    def arguments(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the arguments for a batch: positional, and by keyword."""
        args, kwargs = [], {}
        for entry in self.inputs:
            if entry.name is None:
                args.append(entry.tensor(batch))
            else:
                kwargs[entry.name] = entry.tensor(batch)
        return args, kwargs

    def call(self, model: Callable[..., object], batch: Mapping[str, torch.Tensor]) -> object:
        """Call the model on a batch and return its result.

        Raises ``DataError`` for an index without a category in the model, if torch detects it: on a GPU this ends the process
        instead.
        """
        args, kwargs = self.arguments(batch)
        try:
            return model(*args, **kwargs)
        except IndexError as error:
            named = self.categories
            if not named and "index out of range in self" in str(error):  # an embedding's own words
                named = [name for name in self.features if _are_indexes(batch[name])]
            if not named:
                raise
            found = ", ".join(f"{name!r} up to {int(batch[name].max())}" for name in named)
            raise DataError(
                f"the network has too few categories for the indexes in these rows: {found} ({error}). An embedding needs a "
                "row for each index from 0 on, and one more where StringIndexer keeps strings that it has not seen"
            ) from error


def _are_indexes(values: torch.Tensor) -> bool:
    return not values.is_floating_point() and values.dtype != torch.bool and values.numel() > 0


def positional_inputs(columns: Sequence[str], categories: Sequence[str] | None) -> list[Input]:
    """Return an argument for each column, followed by one for all columns of categories, if there are any."""
    found = [Input(None, (name,)) for name in columns]
    return [*found, Input(None, tuple(categories), "int64", categorical=True)] if categories else found


def side_by_side(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Put the columns of positional arguments side by side, as one argument [rows, numbers] before the other arguments."""
    apart = [entry for entry in inputs if entry.name is None and not entry.categorical]
    together = Input(None, tuple(name for entry in apart for name in entry.columns), expand=True)
    return (together, *(entry for entry in inputs if entry not in apart))


_PLAIN = (torch.float32, torch.int64)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return whole numbers as int64, everything else as float32."""
    if tensor.dtype in _PLAIN:  # the usual case, checked for each column in each step
        return tensor
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.float()
    return tensor.long()


def outputs_of(value: object, layout: Layout) -> list[torch.Tensor]:
    """Return a model's outputs as a list: outputs in a list or tuple by position, outputs in a dict by name.

    Training and ``transform`` both use this order. Raises TypeError for outputs that are not tensors, and ValueError for a dict
    whose names do not say which label or column an output is for.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = [value[name] for name in ordered(list(value), layout)]
    if isinstance(value, (list, tuple)) and value and all(isinstance(entry, torch.Tensor) for entry in value):
        return list(value)
    raise TypeError(f"the model must return a tensor, or a list, tuple or dict of tensors, not {type(value).__name__}")


def ordered(names: Sequence[str], layout: Layout) -> list[str]:
    """Order the names of a dict of outputs like labels and output columns; names that match neither come last.

    An output is named after its label or its column. A single output may have any name, and so may the last output if its column
    has no label. Raises ValueError if names are missing or ambiguous.
    """
    if len(names) == 1:
        return list(names)
    found: list[str] = []
    for place in range(max(len(layout.labels), len(layout.outputs))):
        meant = unique([*layout.labels[place : place + 1], *layout.outputs[place : place + 1]])
        called = [name for name in meant if name in names]
        left = [name for name in names if name not in found]
        if not called and len(left) == 1 and place >= len(layout.labels):
            called = left
        if len(called) != 1 or called[0] in found:
            raise ValueError(
                f"the model returns a dict of the outputs {_listed(names)}, which does not tell the one for "
                f"{_listed(meant, ' or ')}: name each output as its label ({_listed(layout.labels)}) or its "
                f"output column ({_listed(layout.outputs)}) "
                "is named, or return a tuple in their order"
            )
        found += called
    return unique([*found, *names])


def change_places(columns: Sequence[str], known: Sequence[str]) -> bool:
    """Whether a name of ``known`` has another position among ``columns``."""
    return any(name in known and list(known).index(name) != place for place, name in enumerate(columns))


def in_order(outputs: list[torch.Tensor], known: Sequence[str], columns: Sequence[str]) -> list[torch.Tensor]:
    """Return the outputs of a dict with the names ``known`` in the order of columns, which may have changed places.

    Columns with new names take the outputs by position. Raises ValueError if only some of the names are the old ones.
    """
    if not change_places(columns, known):
        return outputs
    if set(columns) != set(known):
        raise ValueError(
            f"outputCols={list(columns)} give names of outputs to others: the network returns a dict, whose outputs are called "
            f"{list(known)}, in this order. Take other names for all of them, or make a TorchModel of the network"
        )
    return [outputs[list(known).index(name)] for name in columns]


def unique(names: Iterable[str]) -> list[str]:
    """Return names without duplicates, in the order of their first appearance."""
    return list(dict.fromkeys(names))


def _listed(names: Iterable[str], between: str = ", ") -> str:
    return between.join(map(repr, names)) or "none"


def _settled(entry: Input, batch: Mapping[str, torch.Tensor]) -> Input:
    if entry.dtype is not None:
        return entry
    is_whole = not any(plain(batch[column]).is_floating_point() for column in entry.columns)
    return replace(entry, dtype="int64" if is_whole else "float32")


def _side_by_side(entry: Input, parts: list[torch.Tensor]) -> torch.Tensor:
    if any(part.is_nested for part in parts):
        what = f"inputs: {entry.name!r} has" if entry.name else "there are"
        raise ValueError(f"{what} lists of different lengths among {list(entry.columns)}; give each its own input")
    if len({part.dtype for part in parts}) > 1:
        parts = [part.float() for part in parts]
    return torch.cat(parts, 1)
