"""What a commit keeps of an object's attributes."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

from spark_elastic.worker.state.attributes import Attributes


class Remembers:
    def __init__(self, rank: int = 0) -> None:
        self.rank, self.count, self.best = rank, 0, None
        self.sums = np.zeros((2, 3), np.float32)
        self.seen: dict[str, Any] = {"epochs": [], "pairs": (1, [2.0])}
        self.tensor = torch.zeros(2)
        self.words = defaultdict(lambda: 0)
        self.last: Any = deque(maxlen=2)
        self.file = object()

    def train(self) -> None:
        self.count += 1
        self.best = np.float64(0.5)
        self.sums += 1
        self.seen["epochs"].append(np.arange(3))
        self.tensor += 1
        self.words["a"] += 1
        self.last.append("x")


def now(callback: Remembers) -> dict[str, Any]:
    values = {name: value for name, value in vars(callback).items() if name not in ("rank", "file", "last")}
    return {**values, "words": dict(callback.words)}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_same(value, other[name])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    else:
        np.testing.assert_array_equal(one, other)


def test_a_newcomer_remembers_what_training_has_changed_and_keeps_what_is_its_own() -> None:
    survivor, newcomer = Remembers(rank=0), Remembers(rank=1)
    known = Attributes(survivor)
    assert known.values() == {}
    survivor.train()
    Attributes(newcomer).load(copy.deepcopy(known.values()))
    assert_same(now(newcomer), now(survivor))
    assert (newcomer.rank, newcomer.file) != (survivor.rank, survivor.file)


def test_a_survivor_goes_back_to_what_it_remembered_at_the_commit_or_at_the_beginning() -> None:
    callback = Remembers()
    known = Attributes(callback)
    callback.train()
    kept, then = copy.deepcopy(known.values()), copy.deepcopy(now(callback))
    callback.train()
    callback.rank = 7  # for the first time, and never committed
    known.load(kept)
    assert_same(now(callback), then)
    assert callback.rank == 0
    known.load(None)
    assert_same(now(callback), now(Remembers()))


def test_what_has_changed_once_is_kept_also_when_it_is_again_what_it_was() -> None:
    callback, newcomer = Remembers(), Remembers()
    known = Attributes(callback)
    callback.count = 1
    known.values()
    callback.count = 0
    newcomer.count = 5
    Attributes(newcomer).load(known.values())
    assert newcomer.count == 0


def test_a_callback_with_a_state_dict_says_what_it_remembers() -> None:
    class Named:
        count = 0
        hidden: Any = None

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    callback, newcomer = Named(), Named()
    known = Attributes(callback)
    callback.count, callback.hidden = 3, 4
    Attributes(newcomer).load(known.values())
    assert (newcomer.count, newcomer.hidden) == (3, None)
    known.load(None)
    assert callback.count == 3


def test_attributes_that_others_set_are_left_out() -> None:
    owner = Remembers()
    known = Attributes(owner, without=("count",))
    owner.train()
    assert "count" not in known.values()
