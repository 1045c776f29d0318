"""Tells map-style datasets apart that have the same class and length, without reading their items.

Each worker makes the dataset anew. Splits that are drawn at random are then another one on each worker, unless they are seeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

# How many rows of a dataset's tensors are compared.
_ROWS = 32


def described(dataset: object) -> dict[str, str]:
    """Describe a dataset by "content", which items its subsets choose, and "sample", some rows of its tensors, if it has any.

    What is not known from torch's own classes, or not of the types that they usually hold, is left out.
    """
    content, sample = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    told: dict[str, str] = {}
    for part in _within(dataset):
        indices = _numbers(getattr(part, "indices", None)) if isinstance(part, Subset) else None
        if indices is not None:
            content.update(indices.tobytes())
            told["content"] = content.hexdigest()
        tensors = getattr(part, "tensors", ()) if isinstance(part, TensorDataset) else ()
        for tensor in tensors if isinstance(tensors, (list, tuple)) else ():
            if isinstance(tensor, torch.Tensor) and _has_rows(tensor):
                sample.update(_rows_of(tensor).tobytes())
                told["sample"] = sample.hexdigest()
    return told


def _within(dataset: object) -> Iterator[Dataset[object]]:
    """Yield the dataset and those that it is made of, as far as torch's own classes tell."""
    if isinstance(dataset, Dataset):
        yield dataset
    if isinstance(dataset, Subset):
        yield from _within(getattr(dataset, "dataset", None))
    if isinstance(dataset, ConcatDataset):
        for each in getattr(dataset, "datasets", ()):
            yield from _within(each)


def _numbers(indices: object) -> np.ndarray | None:
    """Return indices as 64-bit numbers; None if they are anything else."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    if isinstance(indices, torch.Tensor):
        indices = indices.detach().cpu().numpy()
    if not isinstance(indices, (list, tuple, np.ndarray)):
        return None
    try:
        return np.asarray(indices, np.int64)
    except (ValueError, TypeError, OverflowError):  # items may have keys of any kind
        return None


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and tensor.dim() > 0


def _rows_of(tensor: torch.Tensor) -> np.ndarray:
    places = torch.linspace(0, max(len(tensor) - 1, 0), min(_ROWS, len(tensor)), dtype=torch.float64).long()
    rows = tensor.detach()[places.to(tensor.device)].cpu().resolve_conj().contiguous()
    found: np.ndarray = rows.reshape(-1).view(torch.uint8).numpy()
    return found
