"""The training function in this process, as a world of one; callbacks; tensors apart from code."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql.types import StructType
from torch import nn
from worker_stage import Stage

import spark_elastic as se
from spark_elastic.data import read_manifest
from spark_elastic.errors import DataError, TrainingCodeError, WorkerLostError
from spark_elastic.estimator.callback_runner import _does
from spark_elastic.estimator.callbacks import BestModel, Callback, EarlyStopping, EpochContext, MLflow, TensorBoard
from spark_elastic.estimator.classifier import Classes
from spark_elastic.estimator.converters import callback_list
from spark_elastic.estimator.estimator import _check_facts
from spark_elastic.estimator.fit_state import FitState, history_of, kept_weights
from spark_elastic.estimator.fitted import load_weights
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.learning_rate import Sweep
from spark_elastic.estimator.objective import Objective, refuse_ignored
from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan
from spark_elastic.estimator.runs import describe_callbacks
from spark_elastic.estimator.saved_objects import Pickler, Unpickler, names_of_tensors
from spark_elastic.estimator.steps import Passes
from spark_elastic.estimator.training import Trainer, train
from spark_elastic.worker.job import enter_job

ROWS = 100


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """y = 2 x in 100 rows, with weights."""
    folder = tmp_path_factory.mktemp("rows")
    x = np.linspace(-1, 1, ROWS)
    table = pa.table({"x": x, "y": 2 * x, "w": np.abs(x)})
    pq.write_table(table, folder / "part.parquet", row_group_size=30)
    return folder.as_uri()


def plan(dataset: str, **changes: Any) -> TrainingPlan:
    torch.manual_seed(0)
    sizes = {"batch_size": 10, "global_batch_size": None, "validation_batch_size": 16}
    data = {**sizes, "validation_url": dataset, **changes.pop("data", {})}
    steps = {"optimizer": torch.optim.SGD, "optimizer_arguments": {"lr": 0.1}, **changes.pop("steps", {})}
    given: dict[str, Any] = {
        "run_id": "run",
        "model": nn.Linear(1, 1),
        "layout": Layout((Input(None, ("x",), expand=True),), ("y",), changes.pop("weight", None)),
        "objective": Objective((nn.MSELoss(),)),
        "epochs": 2,
        "steps_per_epoch": None,
        "checkpoint_steps": None,
        "seed": 1,
        "callbacks": cloudpickle.dumps(callbacks := changes.pop("callbacks", [])),
        "callbacks_given": describe_callbacks(callbacks),
        "log_url": None,
        "use_gpu": None,
        **changes,
    }
    loading = DataPlan(training_url=dataset, **{"shuffle": True, "seed": 1, **data})
    return TrainingPlan(data=loading, steps=StepPlan(**steps), **given)


def test_history_tells_losses_metrics_rows_and_sizes(dataset: str) -> None:
    import torchmetrics

    metrics = {"bias": lambda output, label: (output - label).mean(), "mae": torchmetrics.MeanAbsoluteError()}
    found = train(plan(dataset, objective=Objective((nn.MSELoss(),), (), metrics)))
    assert found is not None
    assert [entry["epoch"] for entry in found.history] == [0, 1]
    last = found.history[-1]
    assert last["rows"] == ROWS
    assert last["sizes"] == [1]
    assert last["val_loss"] < found.history[0]["val_loss"]
    model = nn.Linear(1, 1)
    model.load_state_dict(found.weights)
    x = torch.linspace(-1, 1, ROWS, dtype=torch.float64).float().unsqueeze(1)
    errors = (model(x) - 2 * x).detach()
    assert last["val_loss"] == pytest.approx(errors.square().mean().item(), rel=1e-4)
    assert last["val_mae"] == pytest.approx(errors.abs().mean().item(), rel=1e-4)
    assert last["val_bias"] == pytest.approx(errors.mean().item(), abs=1e-5)


def test_weights_make_the_loss_a_weighted_mean(dataset: str) -> None:
    found = train(plan(dataset, weight="w", epochs=1, steps={"optimizer_arguments": {"lr": 0.0}}))
    assert found is not None
    model = nn.Linear(1, 1)
    model.load_state_dict(found.weights)
    x = torch.linspace(-1, 1, ROWS).unsqueeze(1)
    weight = x.abs()
    expected = ((model(x) - 2 * x).square() * weight).sum() / weight.sum()
    assert found.history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert found.history[0]["val_loss"] == pytest.approx(expected.item(), rel=1e-4)


@pytest.fixture
def weigh(tmp_path: Path) -> Any:
    """Write 20 rows with these weights."""

    def write(name: str, weights: list[float]) -> str:
        x = np.linspace(-1, 1, len(weights))
        pq.write_table(pa.table({"x": x, "y": 2 * x, "w": weights}), tmp_path / f"{name}.parquet")
        return (tmp_path / f"{name}.parquet").as_uri()

    return write


def test_rows_that_weigh_nothing_together_are_an_error_that_names_the_column(weigh: Any, caplog: Any) -> None:
    ones, zeros = weigh("ones", [1.0] * 20), weigh("zeros", [0.0] * 20)
    with pytest.raises(
        DataError, match=r"all weights of rows \(weightCol: column 'w'\) are 0 in the rows of this epoch's training"
    ):
        train(plan(zeros, weight="w"))
    data = {"validation_url": zeros}
    with pytest.raises(DataError, match=r"column 'w'\) are 0 in the rows of this epoch's validation"):
        train(plan(ones, weight="w", data=data))
    found = train(plan(ones, weight="w", data=data, terminate_on_nan=False))
    assert found is not None
    assert np.isnan(found.history[-1]["val_loss"])
    assert "column 'w') are 0 in the rows of this epoch's validation; its loss is NaN" in caplog.text


def test_a_batch_that_weighs_nothing_changes_nothing(weigh: Any) -> None:
    one = {"shuffle": False, "validation_url": None}
    some = train(plan(weigh("some", [1.0] * 10 + [0.0] * 10), weight="w", epochs=1, data=one))
    alone = train(plan(weigh("alone", [1.0] * 10 + [0.0] * 10), weight="w", epochs=1, steps_per_epoch=1, data=one))
    assert some is not None
    assert alone is not None
    assert torch.equal(some.weights["weight"], alone.weights["weight"])
    assert some.history[0]["loss"] == alone.history[0]["loss"]


def test_a_repeated_batch_adds_nothing_where_the_others_weigh_nothing(dataset: str, monkeypatch: Any) -> None:
    trainer = Trainer(plan(dataset, weight="w"))
    monkeypatch.setattr("spark_elastic.estimator.training.se.rank", lambda: 0)
    monkeypatch.setattr("spark_elastic.estimator.training.se.size", lambda: 1)
    monkeypatch.setattr(trainer, "loader", SimpleNamespace(batch_rows=(0,)))
    monkeypatch.setattr(trainer, "model", trainer.model.module)
    monkeypatch.setattr(nn.Module, "set_rows", lambda *_: None, raising=False)
    batch = {name: torch.ones(3) for name in "xyw"}
    sums = trainer._backward(SimpleNamespace(names=[]), batch, Passes(1, 1.0))
    assert sums.tolist() == [0.0, 0.0]
    assert [parameter.grad.abs().max().item() for parameter in trainer.model.parameters()] == [0.0, 0.0]


def test_a_column_of_weights_that_are_all_0_is_an_error_before_training() -> None:
    facts = {"w": {"min": 0.0, "max": 0.0}}
    with pytest.raises(ValueError, match="weightCol: all weights of column 'w' are 0"):
        _check_facts(StructType(), Layout((), (), "w"), facts)


def test_negative_weights_in_existing_data_name_the_column(weigh: Any) -> None:
    with pytest.raises(DataError, match="weightCol: column 'w' has weights below 0, down to -1"):
        train(plan(weigh("negative", [1.0] * 19 + [-1.0]), weight="w", data={"check": True}))


def test_accumulated_passes_make_the_steps_of_a_larger_batch(dataset: str) -> None:
    small = train(plan(dataset, steps={"passes": 2}))
    large = train(plan(dataset, data={"batch_size": 20}))
    assert small is not None
    assert large is not None
    # The same rows in the same order: two passes of ten are a batch of twenty.
    assert small.weights["weight"].item() == pytest.approx(large.weights["weight"].item(), rel=1e-4)


@pytest.mark.parametrize("weight", [None, "w"])
def test_accumulated_passes_of_different_weights_make_the_step_of_one_batch(dataset: str, weight: str | None) -> None:
    """Of 100 rows, 48 in a batch: the last of three passes has 4 rows, and weights differ, too."""
    data = {"validation_url": None}
    small = train(plan(dataset, weight=weight, data={**data, "batch_size": 48}, steps={"passes": 3}))
    large = train(plan(dataset, weight=weight, data={**data, "batch_size": ROWS}))
    assert small is not None
    assert large is not None
    assert small.weights["weight"].item() == pytest.approx(large.weights["weight"].item(), rel=1e-5)
    assert small.history[1]["loss"] == pytest.approx(large.history[1]["loss"], rel=1e-5)


def test_rows_that_a_transform_leaves_out_or_adds_count_as_they_are(dataset: str) -> None:
    def positive(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = {name: values[batch["x"] > 0] for name, values in batch.items()}
        return {"of all": torch.ones(3, 3), "names": ["x"], **rows}  # type: ignore[dict-item]

    def none(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: values[:0] for name, values in batch.items()}

    data = {"validation_url": dataset, "validation_batch_size": 30, "transform": positive}
    found = train(plan(dataset, epochs=1, data=data, steps={"optimizer_arguments": {"lr": 0.0}}))
    assert found is not None
    weight, bias = found.weights["weight"].item(), found.weights["bias"].item()
    x = np.linspace(-1, 1, ROWS)[ROWS // 2 :]
    expected = pytest.approx(((weight * x + bias - 2 * x) ** 2).mean(), rel=1e-4)
    assert [found.history[0][name] for name in ("loss", "val_loss")] == [expected, expected]
    with pytest.raises(DataError, match="the transform has left none of the 10 rows of a batch"):
        train(plan(dataset, data={"transform": none}))
    with pytest.raises(DataError, match=r"deterministic=True weights shards by their rows.* rows of 5:"):
        train(plan(dataset, data={"transform": positive, "batch_size": None, "global_batch_size": 10, "shards": 2}))


class Counting(nn.Module):
    """Counts in buffers of both kinds, in a tensor and in a number, how often it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.inner = nn.Module()
        self.register_buffer("kept", torch.zeros(()))
        self.inner.register_buffer("also", torch.zeros(()), persistent=False)
        self.inner.register_buffer("alias", self.inner.also, persistent=False)
        self.inner.register_buffer("late", None, persistent=False)
        self.inner.register_buffer("wide", torch.ones(1).expand(3), persistent=False)
        self.lost, self.number, self.same = torch.zeros(()), 0, torch.tensor([1.0, torch.nan])
        self.sparse, self.lists = torch.ones(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.number += 1
            for count in (self.kept, self.inner.also, self.lost):
                count += 1
            self.inner.late = self.inner.also * 2
            self.inner.register_buffer("found", torch.tensor(7.0), persistent=False)
        output: torch.Tensor = self.layer(x)
        return output


@pytest.mark.parametrize("callbacks", [[], [BestModel("val_loss")]])
def test_all_buffers_are_part_of_the_result_and_other_attributes_that_changed_are_named(
    dataset: str, callbacks: Any
) -> None:
    found = train(plan(dataset, model=Counting(), callbacks=callbacks))
    assert found is not None
    assert found.changed == ("lost", "number")
    network = Counting()
    load_weights(network, found.weights, found.buffers)
    assert [network.kept.item(), network.inner.also.item(), network.inner.late.item()] == [20, 20, 40]
    assert network.inner.alias is network.inner.also
    assert network.inner.found.item() == 7
    assert "found" not in network.state_dict()


def test_what_torch_makes_of_parameters_in_each_forward_is_no_attribute_that_changed(dataset: str) -> None:
    found = train(plan(dataset, model=nn.utils.weight_norm(nn.Linear(1, 1))))
    assert found is not None
    assert found.changed == ()


def test_parameters_that_come_to_require_gradients_need_an_optimizer_that_has_them(dataset: str) -> None:
    class Thaw(Callback):
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def on_epoch_end(self, ctx: Any) -> None:
            ctx.model.requires_grad_(True)

    def network() -> nn.Linear:
        model = nn.Linear(1, 1)
        model.bias.requires_grad_(False)
        return model

    with pytest.raises(
        TrainingCodeError, match=r"bias came to require gradients during the fit.*fit again with the fitted"
    ):
        train(plan(dataset, model=network(), callbacks=[Thaw(nn.Linear(1, 1))]))
    model = network()
    steps = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert train(plan(dataset, model=model, callbacks=[Thaw(model)], steps=steps)) is not None


def test_ignored_labels_are_refused_where_rows_cannot_be_weighted_by_what_a_loss_counts() -> None:
    output, label, ignored = torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([0, -100])
    entropy = nn.CrossEntropyLoss()
    refuse_ignored([(entropy, output, label), (nn.MSELoss(), output, output - 100)], ["a", "b"])
    with pytest.raises(DataError, match="CrossEntropyLoss ignores labels of column 'b' that are -100"):
        refuse_ignored([(entropy, output, label), (entropy, output, ignored)], ["a", "b"])
    with pytest.raises(DataError, match="of column 'a' that are 7"):
        refuse_ignored([(nn.CrossEntropyLoss(ignore_index=7), output, torch.tensor([0, 7]))], ["a"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(dataset: str, precision: str) -> None:
    found = train(plan(dataset, epochs=6, steps={"precision": precision, "clip_norm": 1.0}))
    assert found is not None
    assert found.history[-1]["loss"] < 0.2 * found.history[0]["loss"]


def test_a_step_of_ones_own_a_transform_and_fewer_steps(dataset: str) -> None:
    seen: list[tuple[int, int]] = []

    def step(model: Any, batch: Any, ctx: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append((ctx.epoch, ctx.step))
        output = model(batch["x"].unsqueeze(1))
        return (output.squeeze(1) - batch["y"]).square().mean(), output

    def halve(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**batch, "y": batch["y"] / 2}

    found = train(plan(dataset, epochs=12, steps_per_epoch=7, steps={"train_step": step}, data={"transform": halve}))
    assert found is not None
    assert seen[:8] == [*((0, place) for place in range(7)), (1, 0)]
    assert found.history[0]["rows"] == 70
    assert found.weights["weight"].item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("passes", "limit", "steps"), [(1, None, 20), (3, None, 8), (1, 6, 12), (1, 60, 20)])
def test_a_scheduler_is_told_how_long_the_fit_is(dataset: str, passes: int, limit: int | None, steps: int) -> None:
    """Two epochs of 10 batches of 10 rows; OneCycleLR ends at its lowest rate, and raises if there are more steps."""
    cycle = torch.optim.lr_scheduler.OneCycleLR
    told = {"scheduler": cycle, "scheduler_arguments": {"max_lr": 1.0}, "scheduler_interval": "step", "passes": passes}
    data = {"batch_size": None, "global_batch_size": 10}
    trainer = Trainer(plan(dataset, data=data, steps=told, steps_per_epoch=limit))
    assert isinstance(trainer.scheduler, cycle)
    assert trainer.scheduler.total_steps == steps
    found = train(plan(dataset, data=data, steps=told, steps_per_epoch=limit))
    assert found is not None
    assert found.history[-1]["learning_rate"] < 0.1 < found.history[0]["learning_rate"]


def test_a_function_that_makes_a_scheduler_is_told_too_unless_it_knows(dataset: str) -> None:
    seen: list[tuple[int, ...]] = []

    def make(optimizer: Any, steps_per_epoch: int, epochs: int) -> Any:
        seen.append((steps_per_epoch, epochs))
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    def knows(optimizer: Any, steps_per_epoch: int = 3) -> Any:
        seen.append((steps_per_epoch,))
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    for scheduler, arguments in ((make, {}), (make, {"epochs": 9}), (knows, {}), (knows, {"steps_per_epoch": 4})):
        steps = {"scheduler": scheduler, "scheduler_arguments": arguments, "scheduler_interval": "step"}
        Trainer(plan(dataset, data={"batch_size": None, "global_batch_size": 10}, steps=steps))
    assert seen == [(10, 2), (10, 9), (3,), (4,)]


def test_schedulers_step_each_epoch_or_each_step(dataset: str) -> None:
    halving = {"scheduler": torch.optim.lr_scheduler.StepLR, "scheduler_arguments": {"step_size": 1, "gamma": 0.5}}
    for interval, rate in (("epoch", 0.05), ("step", 0.1 * 0.5**20)):
        found = train(plan(dataset, steps={**halving, "scheduler_interval": interval}))
        assert found is not None
        assert found.history[-1]["learning_rate"] == pytest.approx(rate)


def test_nan_in_existing_data_names_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, float("nan")], "y": [1.0, 2.0]}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match="column 'x' has NaN"):
        train(plan(tmp_path.as_uri(), data={"validation_url": None, "check": True}))
    assert len(read_manifest(tmp_path)) == 1


def test_a_fraction_in_existing_data_is_no_class(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": [1.0, 0.7]}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match=r"column 'y' has the label 0.7"):
        train(plan(tmp_path.as_uri(), data={"validation_url": None, "check": True}, class_labels=("y",)))


@pytest.mark.parametrize("label", [-100, 2])
def test_a_label_in_existing_data_that_is_no_class_of_a_classifier_is_named(tmp_path: Path, label: int) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": [1, label]}), tmp_path / "part.parquet")
    data = {"validation_url": None, "check": True}
    entropy = {"model": nn.Linear(1, 2), "objective": Objective((nn.CrossEntropyLoss(),))}
    with pytest.raises(
        DataError, match=rf"'y' has labels from {min(1, label)} to {max(1, label)}; with 2 classes they go"
    ):
        train(plan(tmp_path.as_uri(), data=data, class_labels=("y",), classes=2, **entropy))


class Loud:
    def on_epoch_end(self, ctx: EpochContext) -> None:
        raise KeyError(f"epoch {ctx.epoch}")


def test_an_error_in_a_callback_ends_the_fit(dataset: str) -> None:
    with pytest.raises(KeyError, match="epoch 0"):
        train(plan(dataset, callbacks=[Loud()]))


# ---------------------------------------------------------------- callbacks


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

    def on_exception(self, ctx: Any, error: Exception) -> None:
        self.note(f"{type(error).__name__} {ctx.epoch}/{ctx.step}")
        raise ValueError("this one is logged")


def test_callbacks_hear_of_the_beginning_of_each_step_and_of_what_ends_training(
    dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = train(plan(dataset, callbacks=[Story(tmp_path / "whole")]))
    assert found is not None
    assert (tmp_path / "whole").read_text().splitlines() == ["begin 0 of run", "end 0", "end 1"]
    first, second = (entry["losses"] for entry in found.history)
    assert (len(first), second[:10]) == (10, first), "ten steps an epoch, and attributes stay"
    assert np.mean(first) == pytest.approx(found.history[0]["loss"])
    with pytest.raises(KeyError, match=r"at 1/2, learning rate 0\.1"):
        train(plan(dataset, callbacks=[Story(tmp_path / "failed", fail_at=13)]))
    assert (tmp_path / "failed").read_text().splitlines() == ["begin 0 of run", "end 0", "KeyError 1/2"]
    assert "on_exception of Story has failed" in caplog.text
    diverging = {"optimizer_arguments": {"lr": 1e30}}
    assert train(plan(dataset, steps=diverging, callbacks=[Story(tmp_path / "nan")])) is not None
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


def test_the_losses_of_a_search_keep_their_steps_where_a_worker_is_lost_as_an_epoch_ends(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(plan(dataset, epochs=9, callbacks=[Sweep(20)], commit_steps=1))  # ten steps an epoch
    state, commit, lost = trainer.make_state(), FitState.commit, [WorkerLostError("at the end of an epoch")]

    def lose(state: FitState, durable: bool = False) -> None:
        if durable and lost:
            raise lost.pop()
        commit(state, durable)

    monkeypatch.setattr(FitState, "commit", lose)
    with pytest.raises(WorkerLostError):
        se.elastic(trainer.run)(state)
    state.restore()
    se.elastic(trainer.run)(state)
    found = [[step for step, _ in entry["losses_of_steps"]] for entry in history_of(state)]
    assert found == [[], [*range(10, 20)]], "the notes of the first epoch are lost, and no other loss takes their place"


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


def go_on(state: Any, plan: TrainingPlan) -> list[int]:
    """Let another plan's trainer go on with a state, as from a checkpoint; return what the callbacks have noted in all."""
    trainer = Trainer(plan)
    trainer.model, trainer.optimizer, trainer.loader = state.model, state.optimizer, state.loader
    se.elastic(trainer.run)(state)
    return [entry["left"] for entry in history_of(state)]


def test_a_run_that_a_callback_has_stopped_goes_on_where_more_epochs_are_wanted_and_with_the_callbacks_given(
    dataset: str,
) -> None:
    state = Trainer(plan(dataset, epochs=5, callbacks=[StopAfter(2)])).make_state()
    assert go_on(state, plan(dataset, epochs=5, callbacks=[StopAfter(2)])) == [1, 0]
    assert go_on(state, plan(dataset, epochs=5, callbacks=[StopAfter(2)])) == [1, 0], "nobody wants more"
    assert go_on(state, plan(dataset, epochs=4, callbacks=[StopAfter(2)])) == [1, 0]
    assert go_on(state, plan(dataset, epochs=6, callbacks=[StopAfter(2)])) == [1, 0, -1, -2, -3, -4]
    assert go_on(state, plan(dataset, epochs=9, callbacks=[StopAfter(1)])) == [1, 0, -1, -2, -3, -4, 0]


def test_the_best_model_is_the_result(dataset: str) -> None:
    rising = {"optimizer_arguments": {"lr": 100.0}}  # diverges
    found = train(plan(dataset, epochs=3, steps=rising, callbacks=[BestModel(monitor="loss")]))
    assert found is not None
    last = train(plan(dataset, epochs=1, steps=rising))
    assert last is not None
    assert torch.equal(found.weights["weight"], last.weights["weight"])


@pytest.mark.parametrize(("every", "commits"), [(1, 11), (4, 3), (5, 3), (100, 1)])
def test_a_commit_is_made_every_few_steps_when_a_checkpoint_is_due_and_at_the_end_of_an_epoch(
    dataset: str, every: int, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, bool]] = []
    commit = FitState.commit

    def note(state: FitState, durable: bool = False) -> None:
        made.append((state.step, durable))
        commit(state, durable)

    monkeypatch.setattr(FitState, "commit", note)
    train(plan(dataset, epochs=2, commit_steps=every))  # ten steps an epoch
    assert len(made) == 2 * commits
    assert made[:commits] == [*((step, False) for step in range(every, 11, every)), (0, True)]
    made.clear()
    train(plan(dataset, epochs=1, commit_steps=every, checkpoint_steps=3))
    assert [step for step, durable in made if durable] == [3, 6, 9, 0]


def test_commits_copy_no_constants_that_they_hold_and_restores_set_them(dataset: str) -> None:
    state = Trainer(plan(dataset)).make_state()
    state.best = kept_weights({"weight": torch.ones(1000)})
    for _ in range(2):  # into each of the two buffers
        state.commit()
    spare = state._keeper.snapshots.spare.buffer
    (place,) = spare.held
    spare.views[place].fill_(7.0)  # tells whether it is copied again
    state.commit()
    assert state._keeper.current.buffer.views[place].unique().tolist() == [7.0]
    state.restore()
    assert state.best["weight"].unique().tolist() == [7.0]
    for value in (8.0, 9.0):
        state.best = kept_weights({"weight": torch.full((1000,), value)})
        for _ in range(2):
            state.commit()
            assert state._keeper.current.buffer.views[place].unique().tolist() == [value]
        state.best["weight"].add_(1.0)
        state.commit()
        assert state._keeper.current.buffer.views[place].unique().tolist() == [value + 1]


def test_a_state_of_an_earlier_release_goes_on(dataset: str) -> None:
    state = Trainer(plan(dataset, epochs=3)).make_state()
    state.history, state.best = [{"epoch": 0, "left": 1}], None
    trainer = Trainer(plan(dataset, epochs=1))
    trainer.model, trainer.optimizer, trainer.loader = state.model, state.optimizer, state.loader
    se.elastic(trainer.run)(state)
    assert [entry["epoch"] for entry in history_of(state)] == [0, 0]


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


def test_tensorboard_writes_all_epochs_to_the_runs_logs(dataset: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = train(plan(dataset, callbacks=[TensorBoard()], log_url=tmp_path.as_uri()))
    assert found is not None
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = [entry.value for entry in events.Scalars("val_loss")]
    assert logged == pytest.approx([entry["val_loss"] for entry in found.history])


# ---------------------------------------------------------------- what models are made of


def test_thresholds_follow_sparks_rule() -> None:
    logits = np.array([[2.0, 1.0, 0.0], [0.0, 0.1, 0.2]])
    roles = {"raw": "rawPrediction", "p": "probability", "prediction": "prediction"}
    plain = Classes(roles, None, False)([logits])
    assert plain["prediction"].tolist() == [0.0, 2.0]
    assert plain["p"].sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert Classes(roles, [0.9, 0.9, 0.01], False)([logits])["prediction"].tolist() == [2.0, 2.0]
    assert Classes(roles, [0.0, 0.5, 0.5], False)([logits])["prediction"].tolist() == [0.0, 0.0]
    single = Classes(roles, None, False)([np.array([[1.0], [-1.0]])])
    assert single["p"][:, 1].tolist() == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])
    assert Classes(roles, None, True)([np.array([0.2, 0.8])])["prediction"].tolist() == [0.0, 1.0]


def test_tensors_are_saved_by_name_and_tied_ones_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.extra = torch.ones(1)
    objects = {"params": {"loss": nn.CrossEntropyLoss(torch.ones(2))}, "model": model}
    tensors: dict[str, torch.Tensor] = {}
    code = io.BytesIO()
    Pickler(code, tensors, names_of_tensors(objects)).dump(objects)
    assert set(tensors) >= set(model.state_dict()) - {"2.weight"}
    loaded = Unpickler(io.BytesIO(code.getvalue()), tensors).load()
    copy = loaded["model"]
    assert copy[2].weight is copy[0].weight
    assert not copy[0].bias.requires_grad
    assert all(torch.equal(value, copy.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(loaded["params"]["loss"].weight, torch.ones(2))
