"""How the columns of a batch become what a model is called with. Knows tensors only, so that fit and transform share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}


@dataclass(frozen=True)
class Input:
    """One argument of ``forward``.

    name: its keyword; None for a positional argument, which is one column as it is, scalars as [rows].
    columns: those of a keyword argument are put side by side, scalars as [rows, 1].
    dtype: a key of ``DTYPES``; None keeps whole numbers (int64) and makes all else float32.
    expand: make [rows, 1] of a positional scalar, for models that want a matrix.
    """

    name: str | None
    columns: tuple[str, ...]
    dtype: str | None = None
    expand: bool = False

    def tensor(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the argument: [rows], [rows, …] or a nested tensor."""
        parts = [plain(batch[column]) for column in self.columns]
        if (self.name is not None or self.expand) and not any(part.is_nested for part in parts):
            parts = [part.unsqueeze(1) if part.dim() == 1 else part for part in parts]
        value = parts[0] if len(parts) == 1 else _side_by_side(self, parts)
        return value if self.dtype is None else value.to(DTYPES[self.dtype])


@dataclass(frozen=True)
class Layout:
    """The roles of a dataset's columns."""

    inputs: tuple[Input, ...]
    labels: tuple[str, ...] = ()
    weight: str | None = None

    @property
    def features(self) -> list[str]:
        """The columns that the model needs, each once."""
        return unique(column for entry in self.inputs for column in entry.columns)

    @property
    def columns(self) -> list[str]:
        """The columns that training needs, each once."""
        return unique([*self.features, *self.labels, *([self.weight] if self.weight else [])])

    def call(self, model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        """Call the model on a batch and return what it returns."""
        args, kwargs = [], {}
        for entry in self.inputs:
            if entry.name is None:
                args.append(entry.tensor(batch))
            else:
                kwargs[entry.name] = entry.tensor(batch)
        return model(*args, **kwargs)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return whole numbers as int64, all else as float32."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.float()
    return tensor.long()


def outputs_of(value: Any, names: Sequence[str] = ()) -> list[torch.Tensor]:
    """Return a model's outputs as a list: of a dict those called ``names``, or all in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        wanted = names if names and all(name in value for name in names) else list(value)
        value = [value[name] for name in wanted]
    if isinstance(value, (list, tuple)) and value and all(isinstance(entry, torch.Tensor) for entry in value):
        return list(value)
    raise TypeError(f"the model must return a tensor, or a list, tuple or dict of tensors, not {type(value).__name__}")


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _side_by_side(entry: Input, parts: list[torch.Tensor]) -> torch.Tensor:
    if any(part.is_nested for part in parts):
        raise ValueError(
            f"inputs: {entry.name!r} has lists of different lengths among {list(entry.columns)}; give each its own input"
        )
    if len({part.dtype for part in parts}) > 1:
        parts = [part.float() for part in parts]
    return torch.cat(parts, 1)
