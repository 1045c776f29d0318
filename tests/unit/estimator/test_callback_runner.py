"""When callbacks are called, and what comes of their errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fit_plans import plan
from worker_stage import Stage

import spark_elastic as se
from spark_elastic.errors import NotFiniteLossError
from spark_elastic.estimator.callback_runner import _does
from spark_elastic.estimator.callbacks import BestModel, EarlyStopping, EpochContext
from spark_elastic.estimator.converters import callback_list
from spark_elastic.estimator.fit_state import FitState, history_of
from spark_elastic.estimator.plan import TrainingPlan
from spark_elastic.estimator.training import Trainer, train
from spark_elastic.worker.job import enter_job


class Loud:
    def on_epoch_end(self, ctx: EpochContext) -> None:
        raise KeyError(f"epoch {ctx.epoch}")


def test_an_error_in_a_callback_ends_the_fit(dataset: str) -> None:
    with pytest.raises(KeyError, match="epoch 0"):
        train(plan(dataset, callbacks=[Loud()]))


class LoudAtTheEnd:
    def on_fit_end(self, ctx: Any) -> None:
        raise KeyError("at the end")


def test_an_error_after_the_last_epoch_ends_the_fit_at_once(dataset: str) -> None:
    with pytest.raises(KeyError, match="at the end") as raised:
        train(plan(dataset, callbacks=[LoudAtTheEnd()]))
    assert raised.value.is_final, "a job would otherwise train again from the last commit"


class Story:
    """Notes which of its methods are called, in a file and in the history."""

    def __init__(self, path: Path, fail_at: int | None = None) -> None:
        self.path, self.fail_at, self.losses = path, fail_at, [-1.0]

    def note(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def on_fit_begin(self, ctx: Any) -> None:
        self.losses.clear()
        self.note(f"begin {ctx.epoch} of {ctx.run_id}")

    def on_batch_end(self, ctx: Any) -> None:
        self.losses.append(ctx.loss)
        if self.fail_at == len(self.losses):
            raise KeyError(f"at {ctx.epoch}/{ctx.step}, learning rate {ctx.learning_rate}")

    def on_epoch_end(self, ctx: EpochContext) -> None:
        self.note(f"end {ctx.epoch}")
        ctx.metrics["losses"] = self.losses

    def on_fit_end(self, ctx: Any) -> None:
        self.note(f"over at {ctx.epoch}/{ctx.step}")

    def on_exception(self, ctx: Any, error: Exception) -> None:
        self.note(f"{type(error).__name__} {ctx.epoch}/{ctx.step}")
        raise ValueError("this one is logged")


def test_callbacks_hear_of_the_beginning_of_each_step_and_of_what_ends_training(
    dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = train(plan(dataset, callbacks=[Story(tmp_path / "whole")]))
    assert found is not None
    assert (tmp_path / "whole").read_text().splitlines() == ["begin 0 of run", "end 0", "end 1", "over at 2/0"]
    first, second = (entry["losses"] for entry in found.history)
    assert (len(first), second[:10]) == (10, first), "ten steps an epoch, and attributes stay"
    assert np.mean(first) == pytest.approx(found.history[0]["loss"])
    with pytest.raises(KeyError, match=r"at 1/2, learning rate 0\.1"):
        train(plan(dataset, callbacks=[Story(tmp_path / "failed", fail_at=13)]))
    assert (tmp_path / "failed").read_text().splitlines() == ["begin 0 of run", "end 0", "KeyError 1/2"]
    assert "on_exception of Story has failed" in caplog.text
    diverging = {"optimizer_arguments": {"lr": 1e30}}
    with pytest.raises(NotFiniteLossError):
        train(plan(dataset, steps=diverging, callbacks=[Story(tmp_path / "nan")]))
    assert (tmp_path / "nan").read_text().splitlines()[-1].startswith("NotFiniteLossError 0/")


@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_fails_before_there_is_a_rank_or_in_unpickling_callbacks_does_not_hide_the_error(
    is_damaged: bool, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(state: FitState) -> None:
        if is_damaged:
            state.callbacks = b"no pickle"
        else:
            enter_job(Stage())  # type: ignore[arg-type]
        raise KeyError("the cause")

    monkeypatch.setattr(se, "elastic", lambda function: fail)
    try:
        with pytest.raises(KeyError, match="the cause"):
            train(plan(dataset, callbacks=[Story(tmp_path / "story")]))
    finally:
        enter_job(None)
    assert ("the callbacks cannot be told" in caplog.text) == is_damaged
    assert not (tmp_path / "story").exists()


def test_a_fit_that_goes_on_with_a_run_begins_again_and_a_reset_does_not(dataset: str, tmp_path: Path) -> None:
    story = Story(tmp_path / "story")
    state = Trainer(plan(dataset, callbacks=[story], epochs=1)).make_state()
    for epochs, fit in ((1, "first"), (1, "first"), (2, "second")):
        trainer = Trainer(plan(dataset, callbacks=[story], epochs=epochs, fit_id=fit))
        trainer.model, trainer.optimizer, trainer.loader = state.model, state.optimizer, state.loader
        se.elastic(trainer.run)(state)
    assert (tmp_path / "story").read_text().splitlines() == ["begin 0 of run", "end 0", "begin 1 of run", "end 1"]


def test_a_callback_of_one_method_is_enough_and_the_base_class_does_nothing_at_a_step() -> None:
    steps = SimpleNamespace(on_batch_end=print)
    assert callback_list([steps, EarlyStopping()])
    assert _does(steps, "on_batch_end")
    assert not _does(EarlyStopping(), "on_batch_end"), "so no step waits for its loss"
    assert _does(EarlyStopping(), "on_epoch_end")


class StopAfter:
    """Stops after some epochs of this object's life."""

    def __init__(self, epochs: int) -> None:
        self.epochs = self.left = epochs

    def on_epoch_end(self, ctx: EpochContext) -> None:
        self.left -= 1
        ctx.metrics["left"] = self.left
        if not self.left:
            ctx.stop()


def go_on(state: Any, plan: TrainingPlan) -> list[int | None]:
    """Let another plan's trainer go on with a state, as from a checkpoint; return what the callbacks have noted in all."""
    trainer = Trainer(plan)
    trainer.model, trainer.optimizer, trainer.loader = state.model, state.optimizer, state.loader
    se.elastic(trainer.run)(state)
    return [entry.get("left") for entry in history_of(state)]


def test_a_run_that_a_callback_has_stopped_goes_on_where_more_epochs_are_wanted_and_with_the_callbacks_given(
    dataset: str,
) -> None:
    state = Trainer(plan(dataset, epochs=5, callbacks=[StopAfter(2)])).make_state()
    assert go_on(state, plan(dataset, epochs=5, callbacks=[StopAfter(2)])) == [1, 0]
    assert go_on(state, plan(dataset, epochs=5, callbacks=[StopAfter(2)])) == [1, 0], "nobody wants more"
    assert go_on(state, plan(dataset, epochs=4, callbacks=[StopAfter(2)])) == [1, 0]
    assert go_on(state, plan(dataset, epochs=6, callbacks=[StopAfter(2)])) == [1, 0, -1, -2, -3, -4]
    assert go_on(state, plan(dataset, epochs=9, callbacks=[StopAfter(1)])) == [1, 0, -1, -2, -3, -4, 0]


@pytest.mark.parametrize("others", [[], [EarlyStopping("loss")]])
def test_a_model_that_a_callback_has_kept_is_not_the_result_of_a_run_that_goes_on_without_it(
    dataset: str, others: list[Any]
) -> None:
    best = BestModel("loss")
    state = Trainer(plan(dataset, epochs=1, callbacks=[best])).make_state()
    for _ in range(2):
        go_on(state, plan(dataset, epochs=1, callbacks=[best]))
        assert state.best is not None, "a fit that goes on with the same callbacks keeps it"
    go_on(state, plan(dataset, epochs=2, callbacks=others))
    assert state.best is None
