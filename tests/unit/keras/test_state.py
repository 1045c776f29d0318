"""What a commit of a Keras model holds, and what a rank's gradients weigh."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from keras_networks import fit, network
from worker_stage import on_stage

from spark_elastic.data import ParquetLoader
from spark_elastic.data.stopwatch import LEAST_STEPS, Stopwatch
from spark_elastic.keras import (
    CommitStateCallback,
    KerasState,
)

import keras  # isort: skip  # after spark_elastic.keras, which chooses the backend


def test_a_newcomer_gets_weights_and_moments_but_random_seeds_of_its_own(
    make_loader: Callable[[], ParquetLoader],
) -> None:
    noise = keras.layers.GaussianNoise
    donor, newcomer = (KerasState(network(noise(0.1)), loader=make_loader()) for _ in range(2))
    donor._begin(None)
    fit(donor)
    sent = donor._keeper.current.content()["objects"]
    assert "seeds" not in sent
    newcomer._load(sent)
    for kind in ("weights", "optimizer_variables"):
        pairs = zip(vars(newcomer)[kind].variables, vars(donor)[kind].variables, strict=True)
        assert all(torch.equal(mine.value, its.value) for mine, its in pairs)
    seeds = vars(newcomer)["seeds"].variables
    assert len(seeds) == 1
    before = seeds[0].value.clone()
    with on_stage():
        newcomer._own_as_newcomer(SimpleNamespace(generation=2, rank=1))
    assert not torch.equal(seeds[0].value, before)


@pytest.mark.parametrize(("rows", "weight"), [([6, 2], 1.5), ([4, 4], 1.0), ([0, 8], 0.0), ([3, 3, 2], 1.0)])
def test_a_rank_weighs_as_its_rows(rows: list[int], weight: float) -> None:
    state = KerasState(network())
    state.loader = SimpleNamespace(batch_rows=rows)
    assert state._weight(SimpleNamespace(rank=0, size=2)) == weight


def test_an_optimizer_applies_the_average_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_rank(tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The other rank has 1 everywhere and 2 of the 8 rows."""
        return (tensor + torch.ones_like(tensor) * 2 * 2 / 8) / 2

    frozen = keras.layers.Dense(2)
    model = network(frozen)
    frozen.trainable = False
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss="mse")
    state = KerasState(model)
    state.loader = SimpleNamespace(batch_rows=(6, 2))
    monkeypatch.setattr("spark_elastic.keras.metrics.allreduce", with_another_rank)
    monkeypatch.setattr("spark_elastic.keras.state.present_world", lambda: SimpleNamespace(rank=0, size=2))
    names = ("trainable_weights", "non_trainable_weights")
    weights = {name: [weight.value.clone() for weight in getattr(model, name)] for name in names}
    gradients = [None, *(torch.full_like(weight, 3.0) for weight in weights["trainable_weights"][1:])]
    with torch.no_grad(), pytest.warns(UserWarning, match="not exist"):
        model.optimizer.apply(gradients, model.trainable_weights)
    after = {name: [weight.value for weight in getattr(model, name)] for name in names}
    expected = [weights["trainable_weights"][0], *(weight - 2.5 for weight in weights["trainable_weights"][1:])]
    assert all(map(torch.allclose, after["trainable_weights"], expected))
    mean, variance = weights["non_trainable_weights"][:2]  # of BatchNormalization
    expected = [0.75 * mean + 0.25, 0.75 * variance + 0.25, *weights["non_trainable_weights"][2:]]
    assert all(map(torch.equal, after["non_trainable_weights"], expected))


def test_a_ranks_steps_are_timed_if_gradients_are_applied() -> None:
    now, model = [0.0], network()
    KerasState(model)
    stopwatch = Stopwatch(lambda: now[0])
    for _ in range(LEAST_STEPS + 1):
        stopwatch.start()
        now[0] += 1.0
        with torch.no_grad():
            model.optimizer.apply([torch.zeros_like(v.value) for v in model.trainable_weights], model.trainable_weights)
        now[0] += 0.5
    stopwatch.drop()
    assert stopwatch.microseconds() == 1_500_000
    assert stopwatch.fixed() == 500_000


class CallsInside(keras.Model):
    """Counts as built, because it has no ``build`` that builds what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = keras.layers.Dense(1, name="inside"), keras.layers.Dense(1)
        self.outside.build((None, 1))
        self.compile(optimizer="sgd", loss="mse")
        self.built = True

    def call(self, x: Any) -> Any:
        return self.outside(self.inside(x))


def test_what_cannot_be_kept_is_refused() -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="built"):
        KerasState(unbuilt)
    with pytest.raises(ValueError, match="has an optimizer"):
        KerasState(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    with pytest.warns(UserWarning, match=r"layers of the model are not built \(inside\)"):
        KerasState(CallsInside())
    for commit in ("in_place", "sharded"):
        with pytest.raises(ValueError, match='"copy" or "host"'):
            KerasState(network(), commit=commit)
    with pytest.raises(ValueError, match="must be a whole number from 1 on, not 0"):
        CommitStateCallback(KerasState(network()), batches_per_commit=0)
