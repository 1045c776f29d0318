"""What a fit makes of the settings of an estimator on a device: the weights that one worker gets on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle
import gpu_training
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan
from spark_elastic.testing import kill

ROWS, BATCH = 600, 60
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of 8 numbers, a class of three, a number, a weight, and a list of four classes of which some are ignored."""
    folder = tmp_path_factory.mktemp("fits")
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, 8)).astype(np.float32)
    classes = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
    tokens = random.integers(0, 3, (ROWS, 4))
    tokens[random.random((ROWS, 4)) < 0.3] = -100
    tokens[:, 0] = classes
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 8),
            "class": classes,
            "y": x @ np.arange(8, dtype=np.float32),
            "weight": random.uniform(0, 2, ROWS).astype(np.float32),
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), 4),
        }
    )
    pq.write_table(table, folder / "rows.parquet", row_group_size=97)
    return folder.as_uri()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


class Tokens(nn.Module):
    """Four classes for each row, as [rows, classes, places]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).view(-1, 3, 4)


class TwoHeads(nn.Module):
    """One of the heads is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.spare = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def plan(url: str, label: str, model: nn.Module, loss: Any, **changes: Any) -> TrainingPlan:
    data = DataPlan(
        training_url=url, validation_url=url, global_batch_size=BATCH, validation_batch_size=200, shuffle=True, seed=1
    )
    weight = changes.pop("weight", None)
    return replace(
        TrainingPlan(
            run_id="run", model=model, layout=Layout((Input(None, ("x",)),), (label,), weight),
            objective=Objective((loss,), metrics=changes.pop("metrics", {})),
            data=replace(data, **changes.pop("data", {})),
            steps=StepPlan(
                optimizer=torch.optim.SGD, optimizer_arguments={"lr": 0.2, "momentum": 0.9}, **changes.pop("steps", {})
            ),
            epochs=2, steps_per_epoch=None, checkpoint_steps=None, seed=1, callbacks=cloudpickle.dumps([]),
            callbacks_given="[]", log_url=None, use_gpu=None,
        ),
        **changes,
    )  # fmt: skip


def leave_out(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = batch["x"][:, 2] > -0.5
    return {name: value[kept] for name, value in batch.items()}


def right(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).float()


class Counted:
    """A metric with a state on the device of what it is given."""

    def __init__(self) -> None:
        self.reset()

    def to(self, device: Any) -> Counted:
        self.total = self.total.to(device)
        return self

    def reset(self) -> None:
        self.total = torch.zeros(())

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.total = self.total.to(output.device) + (output.argmax(1) == label).sum()

    def merge_state(self, others: list[Counted]) -> Counted:
        self.total = sum((other.total for other in others), self.total)
        return self

    def compute(self) -> torch.Tensor:
        return self.total

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == label).float().mean()


def own_step(model: Any, batch: Any, context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(batch["x"])
    assert output.device.type == context.device.type
    return nn.functional.cross_entropy(output, batch["class"]), output


def cases(url: str) -> dict[str, TrainingPlan]:
    entropy = nn.CrossEntropyLoss()
    steps = {"clip_norm": 0.5, "passes": 3, "scheduler": torch.optim.lr_scheduler.StepLR,
             "scheduler_arguments": {"step_size": 3}, "scheduler_interval": "step"}  # fmt: skip
    return {
        "weights of rows and classes": plan(url, "class", classifier(), nn.CrossEntropyLoss(reduction="none"),
                                            weight="weight", class_weights=(1.0, 0.5, 2.0), steps=steps),
        "weights within the loss": plan(url, "class", classifier(),
                                        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 2.0])), weighs_labels=True),
        "ignored labels": plan(url, "tokens", Tokens(), entropy, weighs_labels=True),
        "a transform that leaves rows out": plan(url, "class", classifier(), entropy, data={"transform": leave_out}),
        "metrics": plan(url, "class", classifier(), entropy, metrics={"right": right, "counted": Counted()}),
        "a divided optimizer": plan(url, "class", classifier(), entropy, steps={**steps, "zero_redundancy": True}),
        "unused parameters": plan(url, "class", TwoHeads(), entropy, has_unused=True),
        "a step of one's own": plan(url, "class", classifier(), entropy, steps={"train_step": own_step}),
        "in half precision": plan(url, "class", classifier(), entropy, steps={"precision": "fp16", "passes": 2}),
        "in bfloat16": plan(url, "class", classifier(), entropy, steps={"precision": "bf16"}),
    }  # fmt: skip


NAMES = tuple(cases(""))


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_on_a_device_get_the_weights_of_one_on_the_cpu(
    run: Callable[..., Any], device: torch.device, url: str, name: str
) -> None:
    made = cases(url)[name]
    faults = [kill(rank=1, step=5)]
    done = run(gpu_training.train_as_an_estimator, replace(made, use_gpu=True if device.type == "cuda" else None),
               num_proc=2, min_np=2, max_np=2, faults=faults)  # fmt: skip
    assert done.faults == 1
    on_device = done.results[0]
    on_cpu = run(gpu_training.train_as_an_estimator, replace(made, use_gpu=False), num_proc=1, max_np=1).results[0]
    tolerance = {"in half precision": 2e-2, "in bfloat16": 5e-2}.get(name, 1e-4)
    assert on_device.weights.keys() == on_cpu.weights.keys()
    for key, value in on_cpu.weights.items():
        assert on_device.weights[key].device.type == "cpu"
        assert torch.allclose(on_device.weights[key], value, atol=tolerance), key
    for mine, theirs in zip(on_device.history, on_cpu.history, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() & {"loss", "val_loss", "val_counted", "val_right"}:
            assert mine[key] == pytest.approx(theirs[key], rel=10 * tolerance), key


def test_what_is_validated_is_the_network_that_comes_back(
    run: Callable[..., Any], device: torch.device, url: str
) -> None:
    """Also of a network whose buffers differ between workers until an epoch ends."""
    made = plan(url, "class", normalized(), nn.CrossEntropyLoss())
    trained = run(gpu_training.train_as_an_estimator, made, num_proc=2, min_np=2, max_np=2).results[0]
    network = normalized()
    network.load_state_dict(trained.weights)
    table = pq.read_table(url.removeprefix("file://"))
    x = torch.tensor(np.array(table["x"].to_pylist(), dtype=np.float32))
    loss = nn.functional.cross_entropy(network.eval()(x), torch.tensor(table["class"].to_numpy()))
    assert trained.history[-1]["val_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_a_deterministic_fit_has_the_bits_of_one_worker_on_the_device(
    run: Callable[..., Any], device: torch.device, url: str
) -> None:
    made = plan(url, "class", normalized(), nn.CrossEntropyLoss(), data={"shards": 4}, metrics={"right": right})
    found = []
    for size in (1, 3):
        faults = [kill(rank=size - 1, step=4)] if size > 1 else []
        done = run(gpu_training.train_as_an_estimator, made, num_proc=size, min_np=1, max_np=size, env=REPEATABLE,
                   faults=faults)  # fmt: skip
        trained = done.results[0]
        found.append((trained.weights, [entry["loss"] for entry in trained.history]))
    (weights, losses), (others, others_losses) = found
    assert losses == others_losses
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
