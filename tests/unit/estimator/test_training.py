"""The training function in this process, as a world of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fit_plans import ROWS, plan
from pyspark.sql.types import StructType
from torch import nn

from spark_elastic.errors import DataError
from spark_elastic.estimator.estimator import _check_facts
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.steps import Passes
from spark_elastic.estimator.training import Trainer, train


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


@pytest.mark.parametrize("most", [1e-40, 1e36])
def test_a_column_of_weights_whose_sums_are_no_floats_is_an_error_before_training(most: float) -> None:
    with pytest.raises(ValueError, match=r"the largest weight of column 'w' is .*multiply all weights by a number"):
        _check_facts(StructType(), Layout((), (), "w"), {"w": {"min": 0.0, "max": most}})


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


def test_class_indexes_reach_metrics_as_whole_numbers_and_probabilities_of_classes_stay(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, ROWS)
    likely = np.stack([0.3 + 0.2 * x, 0.7 - 0.2 * x], 1)
    table = {"x": x, "y": (x > 0).astype(float), "p": list(likely)}
    pq.write_table(pa.table(table), tmp_path / "part.parquet")
    seen = []

    def kind(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        seen.append(label.dtype)
        return torch.zeros(())

    for label, dtype in (("y", torch.int64), ("p", torch.float32)):
        layout = Layout((Input(None, ("x",), expand=True),), (label,))
        objective = Objective((nn.CrossEntropyLoss(),), (), {"kind": kind})
        found = train(
            plan(
                tmp_path.as_uri(),
                layout=layout,
                model=nn.Linear(1, 2),
                objective=objective,
                class_labels=(label,),
                epochs=1,
            )
        )
        assert found is not None
        assert set(seen) == {dtype}
        seen.clear()
    model = nn.Linear(1, 2)
    model.load_state_dict(found.weights)
    expected = nn.functional.cross_entropy(model(torch.tensor(x[:, None]).float()), torch.tensor(likely).float())
    assert found.history[0]["val_loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_a_worker_of_a_fit_imports_neither_spark_nor_what_starts_jobs() -> None:
    code = (
        "import sys, spark_elastic.estimator.training; print([name for name in sys.modules if "
        "name.startswith(('pyspark', 'py4j', 'spark_elastic.launchers', 'spark_elastic.driver'))])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
