"""Datasets of one class and length are told apart by the items that they choose, and by some rows of their tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loaded_rows import Numbers
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import DataError


def splits() -> Iterator[tuple[Any, Any, Any]]:
    """A dataset, an equal one, and one of the same class and length with other items."""
    numbers = Numbers(100)
    half, other = list(range(50)), list(range(50, 100))
    yield Subset(numbers, half), Subset(Numbers(100), np.array(half)), Subset(numbers, other)
    yield Subset(numbers, half), Subset(numbers, torch.tensor(half)), Subset(numbers, half[::-1])
    yield Subset(numbers, range(3)), Subset(numbers, (0, 1, 2)), Subset(numbers, range(2, -1, -1))
    united = [ConcatDataset([Numbers(3), Subset(numbers, part)]) for part in (half, half, other)]
    yield united[0], united[1], united[2]
    nested = [Subset(Subset(numbers, part), half[:5]) for part in (half, half, other)]
    yield nested[0], nested[1], nested[2]


@pytest.mark.parametrize(("dataset", "same", "other"), list(splits()))
def test_a_position_is_not_taken_over_for_other_items_that_a_subset_chooses(
    dataset: Any, same: Any, other: Any
) -> None:
    """Each worker draws an unseeded split anew: rows counted twice, and those held back trained."""
    state = ElasticDataLoader(dataset, 2).state_dict()
    ElasticDataLoader(same, 2).load_state_dict(state)
    with pytest.raises(DataError, match=r"content was .* give random splits a seed"):
        ElasticDataLoader(other, 2).load_state_dict(state)
    del state["content"]
    ElasticDataLoader(other, 2).load_state_dict(state)  # an earlier release saved it


@pytest.mark.parametrize("rows", [0, 1, 5, 1000])
def test_other_rows_of_tensors_are_warned_of(rows: int) -> None:
    values = (
        torch.rand(rows, 2, dtype=torch.bfloat16),
        torch.rand(rows) > 0.5,
        torch.rand(rows, dtype=torch.complex64).conj(),
    )
    sparse = torch.rand(rows, 3).to_sparse()
    state = ElasticDataLoader(TensorDataset(*values, sparse), 2).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ElasticDataLoader(TensorDataset(*(value.clone() for value in values), sparse), 2).load_state_dict(state)
    if rows > 1:
        with pytest.warns(UserWarning, match="has other rows than where this position was saved"):
            ElasticDataLoader(TensorDataset(*(value.flip(0) for value in values), sparse), 2).load_state_dict(state)


class Chosen(Subset[int]):
    """Subclasses may be made without torch's constructor, and with attributes of other types."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4


class Held(TensorDataset):
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4


class United(ConcatDataset[int]):
    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "dataset",
    [
        Chosen(), Chosen(indices=["a", "b"], dataset=None), Chosen(indices=object()), Chosen(indices=[2**70]), United(), Held(),
        Chosen(indices=torch.ones(2, requires_grad=True)), Held(tensors=np.ones(4)), Held(tensors=[np.ones(4), [1], None]),
        Held(tensors=(torch.ones(4, device="meta"), torch.ones(()))),
    ],
)  # fmt: skip
def test_a_dataset_that_says_nothing_of_its_items_is_taken_as_it_is(dataset: Any) -> None:
    loader = ElasticDataLoader(dataset, 2)
    loader.load_state_dict(loader.state_dict())
