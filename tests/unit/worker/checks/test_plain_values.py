"""What ranks find out about plain values of a State that are not equal on all of them."""

from __future__ import annotations

import random
import threading
import warnings
from collections import deque
from enum import Enum
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from spark_elastic.worker.checks.plain_values import LENGTH, PlainValues, Values, find_differences, take_values


class Stopper:
    """What users write to stop early: it has no state dict."""

    def __init__(self, best: float) -> None:
        self.best = best
        self._bad = 0

    def __call__(self) -> None: ...


class Mode(Enum):
    ON = 1


def differences(one: object, other: object, is_exact: bool = True) -> dict[str, str]:
    return find_differences([take_values({"x": one}), take_values({"x": one}), take_values({"x": other})], is_exact)


def plateau(loss: float) -> object:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    scheduler.step(loss)
    return scheduler


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (0.5, 0.25, "state.x is 0.5 on rank 0 and 0.25 on rank 2"),
        (3, 4, "state.x is 3 on rank 0 and 4 on rank 2"),
        (True, False, "state.x is True on rank 0"),
        (None, "seen", "state.x is None on rank 0 and 'seen' on rank 2"),
        (np.float32(0.5), np.float64(0.25), "state.x is 0.5"),
        (2**70, 2**71, f"state.x is '{2**70}'"),
        ("a" * 100 + "b", "a" * 100 + "c", "(101 characters, "),
        ([0.5], [0.5, 0.25], "state.x[1] is there on rank 2 and not on rank 0"),
        ({"a": deque([1])}, {"a": deque([2])}, "state.x['a'][0] is 1"),
        ({1, 2}, {1}, "state.x is \"['1', '2']\" on rank 0"),
        (Stopper(0.5), Stopper(0.25), "state.x.best is 0.5 on rank 0"),
        (plateau(0.5), plateau(0.25), "state.x.best is 0.5 on rank 0"),
        (torch.zeros(3), torch.ones(3), "state.x has other elements on rank 2 than on rank 0"),
        (torch.zeros(3), torch.zeros(3, 1), "state.x has other elements"),
        (np.zeros(3), np.ones(3), "state.x has other elements"),
        (random.Random(1), random.Random(2), "state.x is 'a Random in the state "),
        (np.random.default_rng(1), np.random.default_rng(2), "state.x is 'a Generator in the state "),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), "state.x is 'a Generator in the state "),
    ],
)
def test_what_differs_is_told_with_its_place_and_both_values(one: Any, other: Any, told: str) -> None:
    found = differences(one, other)
    assert list(found) == ["x"]
    assert told in found["x"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: {"b": [1, (2.0, None)], ("a", 1): np.arange(3)},
        lambda: {str(number) for number in range(50)},
        lambda: np.array([object()]),
        lambda: [random.random()] * (LENGTH + 1),
        lambda: torch.nn.Linear(2, 2),
        lambda: torch.optim.SGD([torch.nn.Parameter(torch.rand(1))]),
        lambda: torch.rand(2, requires_grad=True),
        lambda: torch.utils.data.DataLoader(range(random.randrange(9, 99))),  # type: ignore[arg-type]
        lambda: {object(): 1},
        lambda: {object()},
        threading.Lock,
        object,
        lambda: Mode.ON,
        lambda: print,
        lambda: Stopper,
        lambda: np.longdouble(1) / 3,
        lambda: np.datetime64("2024-01-01"),
        lambda: torch.zeros(2).to_sparse(),
    ],
)
def test_what_is_equal_or_compared_elsewhere_or_no_value_is_no_difference(make: Any) -> None:
    assert not differences(make(), make())


def test_numbers_of_unlike_machines_are_equal_if_they_are_near() -> None:
    assert differences(0.5, 0.5 + 1e-9)
    assert not differences(0.5, 0.5 + 1e-9, is_exact=False)
    assert not differences(torch.zeros(1), torch.full((1,), 1e-9), is_exact=False)
    assert differences(0.5, 0.6, is_exact=False)


def ranks(kinds: tuple[bool, bool] = (False, False)) -> tuple[list[PlainValues], list[Any]]:
    """Two ranks that compare; what each shows is kept for both."""
    shown: list[Any] = []
    compared = []
    for rank in range(2):
        store = SimpleNamespace(gather=lambda key, mine, size: shown)
        group = SimpleNamespace(runs_ahead=kinds[rank])
        values = PlainValues()
        values.begin(SimpleNamespace(rank=rank, size=2, store=store, group=group))  # type: ignore[arg-type]
        compared.append(values)
    return compared, shown


def commit(compared: list[PlainValues], shown: list[Any], index: int, *states: dict[str, object]) -> None:
    digests = [values.report(index, state) for values, state in zip(compared, states, strict=True)]
    mine = [values._mine for values in compared]
    shown[:] = [
        msgspec.msgpack.encode((rank, "a kind", taken[1])) for rank, taken in enumerate(mine) if taken is not None
    ]
    for values in compared:
        values.read(digests)


def test_rank_0_warns_once_of_each_attribute_at_the_users_line() -> None:
    compared, shown = ranks()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in range(1, 4):
            commit(
                compared,
                shown,
                index,
                {"best": 0.5, "a": 1, "h": [index]},
                {"best": 0.25, "a": 1, "h": [index] * index},
            )
    assert [str(warning.message).split(". ")[0] for warning in told] == [
        "state.best is 0.5 on rank 0 and 0.25 on rank 1",
        "state.h[1] is there on rank 1 and not on rank 0",
    ]
    assert 'se.TorchState(local={"best": …})' in str(told[0].message)
    assert "se.allreduce" in str(told[0].message)
    assert {warning.filename for warning in told} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in compared:
            values.begin(values._world)  # the next generation looks again, and tells nothing twice
        commit(compared, shown, 1, {"best": 0.5}, {"best": 0.25})


def test_values_that_differ_are_left_out_from_then_on_so_that_digests_are_equal_again() -> None:
    compared, shown = ranks()
    with pytest.warns(UserWarning, match="best"):
        commit(compared, shown, 1, {"best": 0.5}, {"best": 0.25})
    assert compared[0].report(2, {"best": 0.1}) == compared[1].report(2, {"best": 0.2}) > 0


def test_a_world_of_one_compares_nothing() -> None:
    values = PlainValues()
    values.begin(SimpleNamespace(rank=0, size=1))  # type: ignore[arg-type]
    assert values.report(1, {"best": 0.5}) == 0
    values.read([0])


def test_what_travels_is_small_and_positive() -> None:
    assert 0 < Values({}, {}).digest < 2**63


def test_texts_that_are_not_valid_unicode_are_compared() -> None:
    one, other = (take_values({"name": name, "of": {name: 1}}) for name in ("\udc80", "\udc81"))
    assert one.digest != other.digest
    assert one.digest == take_values({"name": "\udc80", "of": {"\udc80": 1}}).digest
