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
    """Describe a dataset: "content" is which items its subsets choose, "sample" some rows of its tensors; without, neither."""
    parts = list(_within(dataset))
    chosen = [_bytes_of(part.indices) for part in parts if isinstance(part, Subset)]
    tensors = [tensor for part in parts if isinstance(part, TensorDataset) for tensor in part.tensors]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
    told = {"content": chosen, "sample": [_rows_of(tensor) for tensor in dense]}
    return {key: _digest(values) for key, values in told.items() if values}


def _within(dataset: object) -> Iterator[Dataset[object]]:
    """Yield the dataset and those that it is made of, as far as torch's own classes tell."""
    if isinstance(dataset, Dataset):
        yield dataset
    if isinstance(dataset, Subset):
        yield from _within(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        for each in dataset.datasets:
            yield from _within(each)


def _bytes_of(indices: object) -> bytes:
    try:
        return np.asarray(indices, np.int64).tobytes()
    except (ValueError, TypeError, OverflowError):  # items may have keys of any kind
        return repr(indices).encode()


def _rows_of(tensor: torch.Tensor) -> bytes:
    places = torch.linspace(0, max(len(tensor) - 1, 0), min(_ROWS, len(tensor)), dtype=torch.float64).long()
    rows = tensor.detach()[places.to(tensor.device)].cpu().resolve_conj().contiguous()
    return rows.reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(values: list[bytes]) -> str:
    return hashlib.blake2b(b"/".join(values), digest_size=8).hexdigest()
