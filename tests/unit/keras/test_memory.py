"""What a commit keeps of callbacks."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

import spark_elastic.keras  # noqa: F401  # which chooses Keras' backend
from spark_elastic.keras.memory import Memory

import keras  # isort: skip


class Remembers(keras.callbacks.Callback):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
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
    memory = Memory(survivor)
    assert memory.values() == {}
    survivor.train()
    Memory(newcomer).load(copy.deepcopy(memory.values()))
    assert_same(now(newcomer), now(survivor))
    assert (newcomer.rank, newcomer.file) != (survivor.rank, survivor.file)


def test_a_survivor_goes_back_to_what_it_remembered_at_the_commit_or_at_the_beginning() -> None:
    callback = Remembers()
    memory = Memory(callback)
    callback.train()
    kept, then = copy.deepcopy(memory.values()), copy.deepcopy(now(callback))
    callback.train()
    callback.rank = 7  # for the first time, and never committed
    memory.load(kept)
    assert_same(now(callback), then)
    assert callback.rank == 0
    memory.load(None)
    assert_same(now(callback), now(Remembers()))


def test_what_has_changed_once_is_kept_also_when_it_is_again_what_it_was() -> None:
    callback, newcomer = Remembers(), Remembers()
    memory = Memory(callback)
    callback.count = 1
    memory.values()
    callback.count = 0
    newcomer.count = 5
    Memory(newcomer).load(memory.values())
    assert newcomer.count == 0


def test_a_callback_with_a_state_dict_says_what_it_remembers() -> None:
    class Named(keras.callbacks.Callback):
        count = 0
        hidden: Any = None

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    callback, newcomer = Named(), Named()
    memory = Memory(callback)
    callback.count, callback.hidden = 3, 4
    Memory(newcomer).load(memory.values())
    assert (newcomer.count, newcomer.hidden) == (3, None)
    memory.load(None)
    assert callback.count == 3


@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau])
def test_what_keras_callbacks_count_is_plain(kind: Any) -> None:
    """Their attributes are Keras' own, under names that may change."""
    callback = kind("loss", patience=5)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    callback.set_model(model)
    callback.on_train_begin()
    memory = Memory(callback)
    for epoch in range(3):
        callback.on_epoch_end(epoch, {"loss": 1.0})
    assert memory.values().items() >= {"best": 1.0, "wait": 2}.items()
