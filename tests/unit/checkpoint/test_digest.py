"""The content of checkpoints, hashed and compared bit for bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from spark_elastic.checkpoint.digest import digest, first_difference


def test_equal_bits_have_one_hash_however_they_lie_in_memory() -> None:
    one = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "losses": [0.5, 1.5]}
    other = {"model": {"weight": torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]).t()}, "losses": [0.5, 1.5]}
    assert digest(one) == digest(other)
    assert first_difference(one, other) is None


@pytest.mark.parametrize(
    ("one", "other", "where", "how"),
    [
        (
            {"a": torch.tensor([1.0, 2.0, 3.0])}, {"a": torch.tensor([1.0, 2.5, 3.0])},
            "a", "1 of 3 elements, first number 1: 2.0 in the one, 2.5 in the other",
        ),
        ({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}, "a", "1 of 1 elements.*0.0 in the one, -0.0 in"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2).double()}, "a", "torch.float32 .* torch.float64"),
        ({"a": np.array(["x", "y"])}, {"a": np.array(["x", "z"])}, "a", "1 of 2 elements, first number 1: 'y' in the one"),
        ({"a": np.array([1], ">i4")}, {"a": np.array([2], ">i4")}, "a", "1 of 1 elements, first number 0: 1 in the one, 2 in"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, r"a.b\[1\]", "2 in the one, 3 in the other"),
        ({"a": [1, 2]}, {"a": [1]}, "a", "2 entries in the one, 1 in the other"),
        ({"a": 1}, {"a": 1, "b": 2}, "b", "nothing here, the other b"),
        ({"a": 1}, {"c": 1}, "a", "the one has a here, the other c"),
        ({"a": 1}, {"a": 1.0}, "a", "int in the one, float in the other"),
        ({"a": {1: 5}}, {"a": {"1": 5}}, "a.1", "the other a.'1'"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(one: dict[str, object], other: dict[str, object], where: str, how: str) -> None:
    found = first_difference(one, other)
    assert found is not None
    assert re.fullmatch(where, found[0])
    assert re.search(how, found[1])
    assert digest(one) != digest(other)


def test_nan_equals_itself() -> None:
    assert (
        first_difference(
            {"a": torch.tensor([torch.nan]), "b": torch.nan}, {"a": torch.tensor([torch.nan]), "b": torch.nan}
        )
        is None
    )
