"""What is no number names its column and row, and losses that are none end a fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fit_plans import plan
from torch import nn

import spark_elastic as se
from spark_elastic.errors import DataError, NotFiniteLossError
from spark_elastic.estimator import TorchRegressor
from spark_elastic.estimator.callbacks import Callback, FitContext
from spark_elastic.estimator.finite import check_finite
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.model import TorchModel
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.training import train
from spark_elastic.estimator.transform import Scorer

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "word", "row"),
    [
        (torch.tensor([1.0, NAN, 2.0]), "NaN or a null", 1),
        (torch.tensor([1.0, 2.0, -INFINITE]), "an infinite value", 2),
        (torch.tensor([[1.0, 2.0], [3.0, NAN], [NAN, 1.0]]), "NaN or a null", 1),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3), torch.tensor([1.0, INFINITE])], layout=torch.jagged),
         "an infinite value", 2),
        (np.array([1.0, 2.0, NAN]), "NaN or a null", 2),
        (np.array([[1.0, INFINITE], [1.0, 2.0]], np.float32), "an infinite value", 0),
        (np.array([True, None, False], object), "NaN or a null", 1),
        ([np.ones(2), np.array([1.0, NAN]), None], "NaN or a null", 1),
        ([np.ones(2), None, np.ones(1)], "NaN or a null", 1),
        ([np.ones(2), np.array([1, None], object)], "NaN or a null", 1),
    ],
)  # fmt: skip
def test_the_first_row_with_no_finite_number_is_named(values: Any, word: str, row: int) -> None:
    other = torch.arange(3) + 10
    with pytest.raises(DataError, match=rf"column 'x' has {word} in row {row} \(.*, id={row + 10}\)"):
        check_finite({"x": values, "id": other}, ["x"], lambda place: f"row {place}", ["id"])


def test_numbers_are_let_through() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for values in (torch.ones(3), torch.arange(3), jagged, np.ones((2, 2)), np.arange(3), [np.ones(2), np.arange(3)]):
        check_finite({"x": values}, ["x"], str)


def test_values_of_existing_data_are_named_by_file_row_group_and_row(tmp_path: Any) -> None:
    x = np.arange(100.0)
    x[77] = INFINITE
    pq.write_table(pa.table({"x": x, "y": np.zeros(100)}), tmp_path / "part.parquet", row_group_size=30)
    with pytest.raises(
        DataError, match=r"column 'x' has an infinite value in row 17 of .*part.parquet.* \(x=inf, y=0\)"
    ):
        train(plan(tmp_path.as_uri(), data={"validation_url": None, "check": True}))


class AreWeightsFinite(Callback):
    """Writes to a file whether all weights were finite when an exception ended the fit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, ctx: FitContext, error: Exception) -> None:
        self.path.write_text(str(all(bool(value.isfinite().all()) for value in ctx.model.state_dict().values())))


def diverging(**changes: Any) -> dict[str, Any]:
    """A loss that is NaN from the fourth batch on."""
    seen: list[int] = []

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append(1)
        return (output - label).square().mean() * (NAN if len(seen) >= 4 else 1.0)

    return {"objective": Objective((loss,)), **changes}


def test_a_loss_that_is_nan_ends_the_fit_before_it_spoils_the_weights(
    dataset: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(se.TorchState, "report", lambda self, **values: reported.append(values))
    told = AreWeightsFinite(tmp_path / "weights")
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(NotFiniteLossError, match=r"^run ended in epoch 0, step 3: loss is nan; look at learningRate"),
    ):
        train(plan(dataset, callbacks=[told], **diverging(epochs=5)))
    assert caplog.messages == ["epoch 0, step 3: loss is nan"]
    assert [np.isnan(values["loss"]) for values in reported] == [True]
    assert told.path.read_text() == "True"
    with pytest.raises(NotFiniteLossError, match=r"loss is (inf|nan);"):
        train(plan(dataset, epochs=5, steps={"optimizer_arguments": {"lr": 1e30}}))


def test_without_terminate_on_nan_it_is_said_once_an_epoch_and_training_goes_on(
    dataset: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = train(plan(dataset, **diverging(terminate_on_nan=False)))
    assert found is not None
    assert len(found.history) == 2
    assert caplog.messages == ["epoch 0, step 3: loss is nan", "epoch 1, step 0: loss is nan"]


def test_a_validation_loss_that_is_infinite_ends_the_fit(dataset: str) -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).square().mean() * (1.0 if torch.is_grad_enabled() else INFINITE)

    with pytest.raises(NotFiniteLossError, match="epoch 0, step 10: val_loss is inf;"):
        train(plan(dataset, objective=Objective((loss,))))


def test_validation_takes_batches_like_those_of_training(dataset: str) -> None:
    sizes: list[int] = []

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        sizes.append(len(label))
        return (output - label).square().mean()

    given = {"batch_size": None, "global_batch_size": 50, "validation_batch_size": None}
    train(plan(dataset, objective=Objective((loss,)), epochs=1, data=given))
    assert sizes == [50] * 4


# ---------------------------------------------------------------- where tensors are, and what is copied


class Weighted:
    def __init__(self) -> None:
        self.weight = torch.ones(2)

    def __call__(self, output: Any, label: Any) -> Any:
        return self.weight

    def method(self, output: Any, label: Any) -> Any:
        return self.weight


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(2)

    def forward(self, output: Any, label: Any) -> Any:
        return self.weight


def test_losses_and_metrics_move_to_the_models_device_and_the_given_ones_stay() -> None:
    import functools

    weight = torch.ones(2)
    losses = [
        Weighted(), Weighted().method, Loose(), lambda output, label: weight, lambda output, label, weight=weight: weight,
        functools.partial(lambda output, label, weight: weight, weight=torch.ones(2)),
    ]  # fmt: skip
    objective = Objective((*losses, nn.CrossEntropyLoss(torch.ones(2))), metrics={"own": losses[3]})
    on_device = objective.to(torch.device("meta"))
    for loss in (*on_device.losses[:-1], on_device.metrics["own"]):
        assert loss(None, None).device.type == "meta"
    assert on_device.losses[-1].weight.device.type == "meta"
    assert all(loss(None, None).device.type == "cpu" for loss in losses)
    assert objective.losses[-1].weight.device.type == "cpu"
    assert objective.to(torch.device("cpu")) is objective


def test_predict_uses_the_network_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
    network[0].eval()
    regressor = TorchRegressor(model=network, featuresCol="x", labelCol="y")
    model = regressor._make_model(None).describe(
        model=network, layout=Layout((Input(None, ("x",)),), ("y",)), shapes={"x": (2,)}, widths=[0]
    )
    monkeypatch.setattr(nn.Module, "__deepcopy__", None, raising=False)  # cannot be called
    expected = network[1](torch.ones(1, 2)).item()
    assert model.predict(np.ones(2)) == pytest.approx(expected)
    assert (network.training, network[0].training, network[1].training) == (True, False, True)
    with pytest.raises(DataError, match=r"column 'x' has NaN or a null in row 1 \(x=\[1, nan\]\)"):
        model.predict(np.array([[1.0, 1.0], [1.0, NAN]]))


def test_a_network_that_has_changed_is_sent_to_executors_anew() -> None:
    from spark_elastic.estimator.model import _state_of

    model = TorchModel(nn.Linear(1, 1))

    def changed(before: bytes) -> bytes:
        assert _state_of(model.model) != before
        return _state_of(model.model)

    before = _state_of(model.model)
    assert _state_of(model.model) == before
    with torch.no_grad():
        model.model.weight.fill_(2.0)
    before = changed(before)
    model.model.weight.data.zero_()
    before = changed(before)
    model.model.scale = 100.0
    changed(before)


def test_a_double_that_training_would_take_for_infinite_is_an_error_and_large_whole_numbers_stay() -> None:
    fractions = Layout((Input(None, ("x",), "float32", expand=True),))
    with pytest.raises(DataError, match="column 'x' has an infinite value in row 1"):
        Scorer(nn.Identity(), fractions, lambda found: {"p": found[0]})({"x": np.array([1.0, 1e39])})
    whole = Scorer(nn.Identity(), Layout((Input(None, ("x",), "int64"),)), lambda found: {"p": found[0]})
    assert whole({"x": np.array([2.0**24 + 1])})["p"].tolist() == [2**24 + 1]
