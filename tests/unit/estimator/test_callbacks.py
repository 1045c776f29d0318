"""The callbacks that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fit_plans import plan
from torch import nn

from spark_elastic.estimator.callbacks import BestModel, EarlyStopping, EpochContext, MLflow, TensorBoard
from spark_elastic.estimator.training import train


def contexts(*losses: float) -> list[EpochContext]:
    return [EpochContext(epoch, {"loss": loss}, [], None, "run") for epoch, loss in enumerate(losses)]


def test_early_stopping_waits_for_its_patience_and_keeps_the_best() -> None:
    callback, seen = EarlyStopping(patience=2, restore_best=True), contexts(3.0, 2.0, float("nan"), 2.5)
    for ctx in seen:
        callback.on_epoch_end(ctx)
    assert [ctx.kept for ctx in seen] == [True, True, False, False]
    assert [ctx.stopped for ctx in seen] == [False, False, False, True]
    assert (callback.best, callback.best_epoch) == (2.0, 1)
    assert callback.waited == 0, "a fit that goes on is patient again"


def test_the_best_model_is_the_result(dataset: str) -> None:
    rising = {"optimizer_arguments": {"lr": 2.0}}
    found = train(plan(dataset, epochs=3, steps=rising, callbacks=[BestModel(monitor="loss")]))
    assert found is not None
    losses = [entry["loss"] for entry in found.history]
    assert losses == sorted(losses), "the first epoch's is the best"
    last = train(plan(dataset, epochs=1, steps=rising))
    assert last is not None
    assert torch.equal(found.weights["weight"], last.weights["weight"])


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("val_loss", 1.0),
        ("val_MeanSquaredError", 1.0),
        ("val_mape", 1.0),
        ("perplexity", 1.0),
        ("val_accuracy", 2.0),
        ("BinaryAUROC", 2.0),
    ],
)
def test_names_tell_whether_smaller_or_larger_values_are_better(name: str, better: float) -> None:
    callback = BestModel(name)
    for epoch, value in enumerate((1.0, 2.0)):
        callback.on_epoch_end(EpochContext(epoch, {name: value}, [], nn.Linear(1, 1), "run"))
    assert callback.best == better


def test_a_name_that_does_not_tell_needs_a_mode() -> None:
    with pytest.raises(ValueError, match=r"monitor='val_gap' does not tell .* give mode='min' or 'max'"):
        EarlyStopping("val_gap")
    assert EarlyStopping("val_gap", mode="min").mode == "min"


def test_a_monitor_that_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="monitor='auc' is not among the metrics: loss"):
        BestModel("auc").on_epoch_end(contexts(1.0)[0])


def test_mlflow_logs_all_epochs_to_one_run(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import tracking

    found = train(plan(dataset, callbacks=[MLflow(tmp_path.as_uri(), "flights", params={"lr": 0.1})]))
    assert found is not None
    client = tracking.MlflowClient(tmp_path.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("flights").experiment_id])
    assert run.data.params == {"lr": "0.1"}
    logged = [entry.value for entry in client.get_metric_history(run.info.run_id, "val_loss")]
    assert logged == pytest.approx([entry["val_loss"] for entry in found.history])
    assert run.info.status == "FINISHED"


def test_mlflows_run_fails_with_the_fit(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import tracking

    with pytest.raises(KeyError, match="epoch 1"):
        train(plan(dataset, callbacks=[MLflow(tmp_path.as_uri(), "flights"), FailsLater()]))
    client = tracking.MlflowClient(tmp_path.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("flights").experiment_id])
    assert run.info.status == "FAILED"


class FailsLater:
    def on_epoch_end(self, ctx: EpochContext) -> None:
        if ctx.epoch == 1:
            raise KeyError("epoch 1")


def test_mlflow_takes_a_metric_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import tracking

    (context,) = contexts(1.0)
    context.metrics["acc@1, é"] = 0.5
    callback = MLflow(tmp_path.as_uri())
    callback.on_epoch_end(context)
    run = tracking.MlflowClient(tmp_path.as_uri()).get_run(callback.mlflow_run_id)
    assert run.data.metrics["acc_1_ é"] == 0.5


def test_tensorboard_writes_all_epochs_to_the_runs_logs(dataset: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = train(plan(dataset, callbacks=[TensorBoard()], log_url=tmp_path.as_uri()))
    assert found is not None
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = [entry.value for entry in events.Scalars("val_loss")]
    assert logged == pytest.approx([entry["val_loss"] for entry in found.history])
