"""The search for a learning rate: its steps in this process, and what is suggested for a curve of losses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from spark_elastic.estimator import LearningRates, TorchRegressor
from spark_elastic.estimator.learning_rate import Growth, Sweep, find_learning_rate

RATES = [10.0 ** (step / 10) for step in range(-60, 1)]


def curve(lowest: float) -> list[float]:
    """Losses that fall from 1 to 0.1 around a rate, and rise from ten times that rate on, to NaN in the end."""
    falling = [1 - 0.9 / (1 + (lowest / rate) ** 2) for rate in RATES]
    losses = [loss + (rate / (10 * lowest)) ** 3 for loss, rate in zip(falling, RATES, strict=True)]
    return [loss if loss < 100 else math.nan for loss in losses]


@pytest.mark.parametrize("lowest", [1e-4, 1e-3, 1e-2])
def test_the_rate_at_which_the_loss_falls_fastest_is_suggested(lowest: float) -> None:
    found = LearningRates(RATES, curve(lowest)).suggestion
    assert found is not None
    assert lowest / 2 < found < 4 * lowest


@pytest.mark.parametrize("seed", range(10))
def test_noise_before_the_fall_is_not_taken_for_it(seed: int) -> None:
    """The difference between the first batches was."""
    noise = numpy.random.default_rng(seed).normal(1, 0.2, len(RATES))
    found = LearningRates(RATES, [*(curve(1e-2) * noise)]).suggestion
    assert found is not None
    assert 1e-3 < found < 1e-1


def test_hardly_ever_is_a_rate_suggested_where_there_is_but_noise() -> None:
    """It was for each of them. Of some eighty lines, one may be steep by chance."""
    curves = numpy.random.default_rng(0).normal(1, 0.2, (50, len(RATES)))
    suggested = [LearningRates(RATES, [*losses]).suggestion for losses in curves]
    assert suggested.count(None) >= 40


@pytest.mark.parametrize("losses", [[], [1.0], [math.nan] * 9, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
def test_nothing_is_suggested_where_the_loss_never_falls(losses: list[float]) -> None:
    assert LearningRates(RATES[: len(losses)], losses).suggestion is None


def test_falls_of_a_loss_that_has_begun_to_diverge_do_not_count() -> None:
    falling = [1.0 - step / 20 for step in range(16)]
    rates = [10.0**step for step in range(-15, 31)]
    found = LearningRates(rates, [*falling, *[90.0] * 15, *[1.0] * 15]).suggestion
    assert found is not None
    assert found <= rates[len(falling)]


def test_the_rate_grows_by_a_constant_factor_to_the_end() -> None:
    growth = Growth(100.0, 3)
    assert [growth(step) for step in range(5)] == pytest.approx([1.0, 10.0, 100.0, 100.0, 100.0])


class Fitted(SimpleNamespace):
    """Stands for the model of a fit of nine steps an epoch, the last of which diverges."""


def test_the_estimator_stays_as_it_is_and_its_copy_is_trained_for_so_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "scheduler": torch.optim.lr_scheduler.StepLR,
        "schedulerParams": {"step_size": 1},
        "runId": "mine",
        "epochs": 3,
    }
    estimator = TorchRegressor(model=torch.nn.Linear(2, 1), learningRate=0.1, **given)
    fits: list[TorchRegressor] = []

    def fit(self: TorchRegressor, dataset: Any) -> Fitted:
        fits.append(self)
        (sweep,) = self.getCallbacks() or []
        history: list[dict[str, Any]] = []
        stopped: list[bool] = []
        while not stopped:
            context: Any = SimpleNamespace(metrics={}, stop=lambda: stopped.append(True))
            for step in [0, 1, 1, *range(2, 9)]:  # a loss repeats a step
                sweep.on_batch_end(SimpleNamespace(global_step=(at := len(history) * 9 + step), loss=float(at)))
            sweep.on_epoch_end(context)
            history.append(context.metrics)
        return Fitted(history=history, run_id="trial")

    monkeypatch.setattr(TorchRegressor, "fit", fit)
    found = estimator.find_learning_rate("rows", low=1e-3, high=10.0, steps=20)  # type: ignore[arg-type]
    assert found.losses == [float(step) for step in range(20)], "of three epochs of nine steps"
    assert (found.rates[0], found.rates[-1]) == pytest.approx((1e-3, 10.0))
    (trial,) = fits
    assert [trial.value(name) for name in ("runId", "learningRate", "stepsPerEpoch", "schedulerInterval")] == [
        None, 1e-3, 20, "step",
    ]  # fmt: skip
    assert [estimator.value(name) for name in ("learningRate", *given, "callbacks")] == [0.1, *given.values(), None]
    assert isinstance(trial.getCallbacks()[0], Sweep)  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((0.0, 1.0, 9), "low and high: must be a number above 0, not 0.0"), ((1.0, 0.1, 9), "smaller than high, not 1.0 and 0.1"),
     ((0.1, math.inf, 9), "low and high: must be a number above 0, not inf"),
     ((0.1, 1.0, 1), "steps must be a whole number from 2 on, not 1")],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments: tuple[float, float, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_learning_rate(TorchRegressor(model=torch.nn.Linear(1, 1)), None, *arguments)  # type: ignore[arg-type]


def test_an_optimizer_instance_has_a_rate_of_its_own() -> None:
    network = torch.nn.Linear(1, 1)
    estimator = TorchRegressor(model=network, optimizer=torch.optim.SGD(network.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="give the optimizer's class"):
        find_learning_rate(estimator, None, 1e-6, 1.0, 9)  # type: ignore[arg-type]
