"""Keras models in a state: what a commit holds, what fit takes from a loader, and what is refused."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from worker_stage import on_stage

import spark_elastic.keras as module
from spark_elastic.keras import (
    Batches,
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

import keras  # isort: skip  # after spark_elastic.keras, which chooses the backend

from spark_elastic import TrainingCodeError
from spark_elastic.data import ElasticDataLoader, ParquetLoader
from spark_elastic.data.stopwatch import LEAST_STEPS, Stopwatch

ROWS = 50


def network(*more: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), *more, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


@pytest.fixture
def make_loader(tmp_path: Path) -> Callable[[], ParquetLoader]:
    values = [float(row) / ROWS for row in range(ROWS)]
    pq.write_table(pa.table({"x": values, "y": values}), tmp_path / "part.parquet")
    return lambda: ParquetLoader(str(tmp_path), global_batch_size=8)


@pytest.fixture
def loader(make_loader: Callable[[], ParquetLoader]) -> ParquetLoader:
    return make_loader()


def convert(batch: Any) -> tuple[Any, Any]:
    x = batch["x"].float()
    return torch.stack([x, x], 1), batch["y"].float()


def fit(state: KerasState, *callbacks: Any) -> None:
    batches = Batches(state.loader, convert)
    ours = [CommitStateCallback(state), UpdateBatchStateCallback(state), UpdateEpochStateCallback(state)]
    state.model.fit(
        batches, initial_epoch=state.epoch, epochs=state.epoch + 1, verbose=0, callbacks=[*ours, *callbacks]
    )


def values(state: KerasState) -> list[Any]:
    variables = [*state.model.variables, *state.optimizer.variables]
    return [variable.value.detach().clone() for variable in variables]


class Stop(keras.callbacks.Callback):
    """Interrupts at the end of a batch, after the commit if there is one, as a loss would."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            raise ConnectionError


def test_training_goes_on_exactly_where_the_last_commit_was(make_loader: Callable[[], ParquetLoader]) -> None:
    straight = KerasState(network(), loader=make_loader())
    straight._begin(None)
    fit(straight)
    fit(straight)
    broken = KerasState(network(), loader=make_loader())
    broken._begin(None)
    for stop in (0, 2):
        with pytest.raises(ConnectionError):
            fit(broken, Stop(stop))
        torch.nn.init.zeros_(broken.model.weights[0].value)
        broken.optimizer.learning_rate = 7.0
        broken.restore()
    fit(broken)
    fit(broken)
    assert (broken.epoch, broken.batch, broken.loader.epoch) == (2, 0, 2)
    assert all(map(torch.equal, values(broken), values(straight)))


def test_the_last_batch_is_committed_with_its_epoch_so_that_a_newcomer_always_has_one_to_begin_with(
    make_loader: Callable[[], ParquetLoader],
) -> None:
    donor, newcomer = (KerasState(network(), loader=make_loader()) for _ in range(2))
    donor._begin(None)
    with pytest.raises(ConnectionError):
        fit(donor, Stop(len(donor.loader) - 1))
    newcomer._load(donor._keeper.current.content()["objects"])
    newcomer._enter_world(0, 1)
    assert (newcomer.epoch, newcomer.batch, newcomer.loader.steps_left) == (0, len(newcomer.loader) - 1, 1)
    fit(newcomer)
    assert (newcomer.epoch, newcomer.batch, newcomer.loader.steps_left) == (1, 0, len(newcomer.loader))


def test_fit_takes_every_row_once_and_never_one_ahead(loader: ParquetLoader) -> None:
    state = KerasState(network(), loader=loader)
    state._begin(None)
    seen: list[tuple[int, int]] = []
    rows: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((loader.rows_processed, state.batch))

    def noting(batch: Any) -> tuple[Any, Any]:
        rows.extend(batch["y"].tolist())
        return convert(batch)

    state.model.fit(Batches(loader, noting), epochs=1, verbose=0, callbacks=[UpdateBatchStateCallback(state), Watch()])
    assert seen == [(8, 1), (16, 2), (24, 3), (32, 4), (40, 5), (50, 6)]
    assert sorted(rows) == [row / ROWS for row in range(ROWS)]


def test_batches_are_good_for_one_epoch(loader: ParquetLoader) -> None:
    with pytest.raises(ValueError, match="new Batches each time"):
        network().fit(Batches(loader, convert), epochs=2, verbose=0)


def test_fit_for_more_than_one_epoch_is_refused(loader: ParquetLoader) -> None:
    state = KerasState(network(), loader=loader)
    with pytest.raises(ValueError, match=r"epochs=3 at state\.epoch=0"):
        state.model.fit(Batches(loader, convert), epochs=3, verbose=0, callbacks=[UpdateEpochStateCallback(state)])


def test_commits_come_every_so_many_batches_and_at_the_end(loader: ParquetLoader) -> None:
    state = KerasState(network(), loader=loader)
    state._begin(None)
    state.model.fit(Batches(loader, convert), epochs=1, verbose=0, callbacks=[CommitStateCallback(state, 4)])
    assert state._commits.steps == 1 + 1  # after the fourth of six batches, and when fit ends


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


def dense() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return model


def of_items(batch: Any) -> tuple[Any, Any]:
    return batch, batch[:, :1] ** 2


@pytest.mark.parametrize(
    ("make", "prepare"),
    [
        (lambda url, **kw: ParquetLoader(url, global_batch_size=8, **kw), convert),
        (
            lambda url, **kw: ElasticDataLoader(
                torch.linspace(-1, 1, 2 * ROWS).view(ROWS, 2), global_batch_size=8, **kw
            ),
            of_items,
        ),
    ],
    ids=["cut here", "delivered in shards"],
)
def test_steps_over_shards_are_steps_over_batches(
    make: Callable[..., Any], prepare: Any, make_loader: Any, tmp_path: Path
) -> None:
    trained = []
    for how in ({}, {"shards": 3}):
        state = KerasState(dense(), loader=make(str(tmp_path), **how))
        state._begin(None)
        history = state.model.fit(
            Batches(state.loader, prepare), epochs=1, verbose=0, callbacks=[CommitStateCallback(state)]
        )
        trained.append((*values(state), torch.tensor(history.history["loss"])))
    for mine, its in zip(*trained, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_on_shards_gradients_outside_of_a_train_step_are_refused(make_loader: Any, tmp_path: Path) -> None:
    state = KerasState(dense(), loader=ParquetLoader(str(tmp_path), global_batch_size=8, shards=2))
    state._begin(None)
    next(iter(state.loader))
    weights = state.model.trainable_weights
    with pytest.raises(TrainingCodeError, match="train by model"):
        state.optimizer.apply([torch.zeros_like(weight.value) for weight in weights], weights)


@pytest.mark.parametrize(("rows", "weight"), [([6, 2], 1.5), ([4, 4], 1.0), ([0, 8], 0.0), ([3, 3, 2], 1.0)])
def test_a_rank_weighs_as_its_rows(rows: list[int], weight: float) -> None:
    state = KerasState(network())
    state.loader = SimpleNamespace(batch_rows=rows)
    assert state._weight(SimpleNamespace(rank=0, size=2)) == weight


def test_an_optimizer_applies_the_average_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_rank(tensor: torch.Tensor) -> torch.Tensor:
        """The other rank has 1 everywhere and 2 of the 8 rows."""
        return (tensor + torch.ones_like(tensor) * 2 * 2 / 8) / 2

    frozen = keras.layers.Dense(2)
    model = network(frozen)
    frozen.trainable = False
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss="mse")
    state = KerasState(model)
    state.loader = SimpleNamespace(batch_rows=(6, 2))
    monkeypatch.setattr("spark_elastic.keras.allreduce", with_another_rank)
    monkeypatch.setattr("spark_elastic.keras.present_world", lambda: SimpleNamespace(rank=0, size=2))
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


def test_what_a_rank_needs_for_a_step_is_timed_up_to_the_average() -> None:
    now, model = [0.0], network()
    KerasState(model)
    stopwatch = Stopwatch(lambda: now[0])
    for _ in range(LEAST_STEPS + 1):
        stopwatch.start()
        now[0] += 1.0
        with torch.no_grad():
            model.optimizer.apply([torch.zeros_like(v.value) for v in model.trainable_weights], model.trainable_weights)
        now[0] += 1.0  # the average waits for other ranks
    stopwatch.drop()
    assert stopwatch.microseconds() == 1_000_000


def test_what_cannot_be_kept_is_refused() -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="built"):
        KerasState(unbuilt)
    with pytest.raises(ValueError, match="has an optimizer"):
        KerasState(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    for commit in ("in_place", "sharded"):
        with pytest.raises(ValueError, match='"copy" or "host"'):
            KerasState(network(), commit=commit)
    with pytest.raises(ValueError, match="must be a whole number from 1 on, not 0"):
        CommitStateCallback(KerasState(network()), batches_per_commit=0)


def test_another_backend_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", other)
    with pytest.raises(ImportError, match="KERAS_BACKEND=torch, not jax"):
        runpy.run_path(module.__file__)
