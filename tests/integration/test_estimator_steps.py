"""Steps of two workers are those of one process with all rows, whatever counts in them, and what is validated is the result."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from pyspark.sql import functions as f
from torch import nn

from spark_elastic.errors import TrainingFailedError
from spark_elastic.estimator import TorchClassifier, TorchEstimator, TorchModel, TorchRegressor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, TOKENS, CLASSES = 40, 3, 4
RATE = 0.5


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Labels of tokens in ``tags``, of which few rows have nearly all; numbers in ``x`` and ``y``, weights in ``w``."""
    row = f.col("id")
    tag = [f.when((row + place) % 5 == 0, (row + place) % CLASSES).otherwise(-100) for place in range(TOKENS)]
    return spark.range(0, ROWS, 1, 2).select(
        f.array((row % 7) / 7, (row % 3) / 3).alias("x"), ((row % 7) / 7 - (row % 11) / 5).alias("y"),
        f.array(*tag).cast("array<bigint>").alias("tags"), (row % 4 + 0.5).alias("w"),
    ).persist()  # fmt: skip


class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, CLASSES * TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).reshape(len(x), CLASSES, TOKENS)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.norm(x))
        return output


class Largest:
    """A metric that keeps a state, and is no torchmetrics."""

    def __init__(self) -> None:
        self.reset()

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return label.max()

    def to(self, device: Any) -> Largest:
        return self

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.seen += label.flatten().tolist()

    def merge_state(self, others: list[Largest]) -> None:
        self.seen += [value for other in others for value in other.seen]

    def compute(self) -> float:
        return max(self.seen) + 1000 * len(self.seen)


def below_half(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values[batch["y"] < 0.5] for name, values in batch.items()}


def columns(frame: Any) -> dict[str, torch.Tensor]:
    rows = frame.collect()
    return {name: torch.tensor([row[name] for row in rows]) for name in frame.columns}


def fit(frame: Any, model: nn.Module, loss: Any, label: str, **others: Any) -> Any:
    given = {"globalBatchSize": ROWS, "epochs": 2, "verbose": 0, **others}
    return TorchEstimator(
        model=model, loss=loss, featureCols=["x"], labelCols=[label], optimizer=torch.optim.SGD, learningRate=RATE,
        minNp=2, maxNp=2, numProc=2, adaptiveNp=False, **given,
    ).fit(frame)  # fmt: skip


def stepped(model: nn.Module, loss: Any, steps: int = 2) -> list[float]:
    """Make steps on all rows in this process, and return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def check(fitted: Any, model: nn.Module, losses: list[float]) -> None:
    assert [entry["loss"] for entry in fitted.history] == pytest.approx(losses, rel=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(fitted.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_labels_in_lists_that_the_loss_ignores_do_not_count(frame: Any) -> None:
    model, entropy = Tags(), nn.CrossEntropyLoss()
    fitted = fit(frame, model, entropy, "tags")
    rows = columns(frame)
    check(fitted, model, stepped(model, lambda network: entropy(network(rows["x"].float()), rows["tags"])))


def test_rows_that_the_transform_leaves_out_do_not_count(frame: Any) -> None:
    model, squares = nn.Linear(2, 1), nn.MSELoss()
    fitted = fit(frame, model, squares, "y", transform=below_half)
    rows = below_half(columns(frame))
    assert 0 < len(rows["y"]) < ROWS
    check(fitted, model, stepped(model, lambda net: squares(net(rows["x"].float()).squeeze(1), rows["y"].float())))


def test_passes_of_one_step_count_by_the_weights_of_their_rows(frame: Any) -> None:
    model = nn.Linear(2, 1)
    passes = {"globalBatchSize": 16, "backwardPassesPerStep": 3, "weightCol": "w"}
    fitted = fit(frame, model, nn.MSELoss(), "y", **passes)
    rows = {name: values.float() for name, values in columns(frame).items()}
    weight = rows["w"] / rows["w"].sum()
    check(fitted, model, stepped(model, lambda net: ((net(rows["x"]).squeeze(1) - rows["y"]).square() * weight).sum()))


def test_what_is_validated_is_the_network_that_the_fit_returns(frame: Any) -> None:
    """Each worker's running statistics are those of its own rows."""
    both = frame.withColumn("held", f.lit(False)).union(frame.where("w > 3").withColumn("held", f.lit(True)))
    fitted = fit(both, Normed(), nn.MSELoss(), "y", validationIndicatorCol="held")
    rows = columns(both.where("held").drop("held"))
    with torch.no_grad():
        found = nn.functional.mse_loss(fitted.model(rows["x"].float()).squeeze(1), rows["y"].float())
    assert fitted.history[-1]["val_loss"] == pytest.approx(found.item(), rel=1e-4)


def test_a_metric_of_ones_own_that_keeps_a_state_sees_the_rows_of_all_workers(frame: Any) -> None:
    both = frame.withColumn("held", f.lit(False)).union(frame.withColumn("held", f.lit(True)))
    fitted = fit(both, nn.Linear(2, 1), nn.MSELoss(), "y", validationIndicatorCol="held", metrics=[Largest()])
    largest = frame.agg(f.max("y")).first()[0]
    assert fitted.history[-1]["val_Largest"] == pytest.approx(largest + 1000 * ROWS, rel=1e-6)


def test_hooks_on_gradients_of_parameters_train_in_a_fit_as_here(frame: Any) -> None:
    model, squares = nn.Linear(2, 1), nn.MSELoss()
    mask = torch.tensor([[1.0, 0.0]])
    model.weight.register_hook(lambda gradient: gradient * mask)
    fitted = fit(frame, model, squares, "y")
    rows = columns(frame)
    check(fitted, model, stepped(model, lambda net: squares(net(rows["x"].float()).squeeze(1), rows["y"].float())))


def test_a_column_that_spark_takes_for_two_is_refused_by_both_names(frame: Any) -> None:
    doubled = frame.select("*", frame["x"].alias("X"))
    for run in (
        lambda: fit(doubled, nn.Linear(2, 1), nn.MSELoss(), "y"),
        lambda: TorchModel(model=nn.Linear(2, 1), featureCols=["x"], outputCols=["out"]).transform(doubled),
    ):
        with pytest.raises(ValueError, match="the columns 'x' and 'X' have one name to Spark, which ignores case"):
            run()


class Impatient:
    """Ends a fit in its second step."""

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.global_step == 1:
            raise KeyError("enough")


def test_an_error_in_a_callback_at_a_step_ends_the_fit_and_is_no_loss_of_a_worker(frame: Any) -> None:
    with pytest.raises(TrainingFailedError, match="KeyError: 'enough'"):
        fit(frame, nn.Linear(2, 1), nn.MSELoss(), "y", callbacks=[Impatient()])


def test_an_output_column_that_spark_takes_for_another_one_is_refused(frame: Any) -> None:
    model = TorchModel(model=nn.Linear(2, 1), featureCols=["x"], outputCols=["W"])
    with pytest.raises(ValueError, match="the output column 'W' exists already in the DataFrame, as 'w'"):
        model.transform(frame)


def test_a_fit_refuses_output_columns_that_the_frame_has_already_before_it_trains(frame: Any) -> None:
    with pytest.raises(ValueError, match="the output column 'prediction' exists already in the DataFrame"):
        fit(frame.withColumn("prediction", f.lit(1.0)), nn.Linear(2, 1), nn.MSELoss(), "y")
    regressor = TorchRegressor(model=nn.Linear(2, 1), featuresCol="x", labelCol="y", predictionCol="Y", epochs=1)
    with pytest.raises(ValueError, match="the output column 'Y' exists already in the DataFrame, as 'y'"):
        regressor.fit(frame)
    classifier = TorchClassifier(model=nn.Linear(2, 2), featuresCol="x", labelCol="y", probabilityCol="w", epochs=1)
    with pytest.raises(ValueError, match="the output column 'w' exists already"):
        classifier.fit(frame)


@pytest.mark.parametrize(
    ("name", "said"), [("prediction", "'prediction'; give"), ("Prediction", ", as Spark ignores case")]
)
def test_a_fit_refuses_two_outputs_of_one_name_before_it_trains(frame: Any, name: str, said: str) -> None:
    classifier = TorchClassifier(model=nn.Linear(2, 2), featuresCol="x", labelCol="y", rawPredictionCol=name, epochs=1)
    with pytest.raises(ValueError, match=f"two outputs have the column .*{said}"):
        classifier.fit(frame)
