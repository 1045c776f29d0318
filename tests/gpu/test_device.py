"""What a worker finds as its device, and what of a fit runs there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gpu_training
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import spark_elastic as se
from spark_elastic import TrainingFailedError
from spark_elastic.data.elastic_dataloader import ElasticDataLoader
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan


def test_a_worker_sees_its_own_gpu_only_and_that_is_its_device(
    run: Callable[..., Any], device: torch.device, gpus: tuple[str, ...]
) -> None:
    for seen in run(gpu_training.look_at_the_device, num_proc=2, max_np=2).results:
        assert seen["sum"] == 3.0
        if device.type == "cuda":
            assert (seen["device"], seen["visible"], seen["count"]) == ("cuda:0", gpus[0], 1)
        else:
            assert (seen["device"], seen["count"]) == ("cpu", 0)


def test_outside_a_job_the_device_is_a_gpu_if_there_is_one(device: torch.device) -> None:
    assert se.device().type == device.type


@pytest.mark.gpu
def test_local_slots_are_as_many_as_there_are_gpus(gpus: tuple[str, ...]) -> None:
    assert [seen["visible"] for seen in se.run(gpu_training.look_at_the_device, local=True)] == list(gpus)
    se.shutdown()


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """y = 2 x in 4,000 rows, in four row groups."""
    x = np.random.default_rng(0).uniform(-1, 1, 4000)
    pq.write_table(pa.table({"x": x, "y": 2 * x}), tmp_path / "part.parquet", row_group_size=1000)
    return tmp_path.as_uri()


def plan(url: str, use_gpu: bool | None) -> TrainingPlan:
    torch.manual_seed(0)
    data = DataPlan(
        training_url=url, validation_url=url, batch_size=None, global_batch_size=100, validation_batch_size=500,
        shuffle=True, seed=1,
    )  # fmt: skip
    return TrainingPlan(
        run_id="run", model=torch.nn.Linear(1, 1), layout=Layout((Input(None, ("x",), expand=True),), ("y",), None),
        objective=Objective((torch.nn.MSELoss(),)), data=data,
        steps=StepPlan(optimizer=torch.optim.SGD, optimizer_arguments={"lr": 0.5}), epochs=2, steps_per_epoch=None,
        checkpoint_steps=None, seed=1, callbacks=cloudpickle.dumps([]), callbacks_given="[]", log_url=None, use_gpu=use_gpu,
    )  # fmt: skip


def test_a_fit_trains_on_the_gpu_and_returns_weights_on_the_cpu(
    run: Callable[..., Any], device: torch.device, rows: str
) -> None:
    wanted = True if device.type == "cuda" else None
    (first, second) = run(gpu_training.train_as_an_estimator, plan(rows, wanted), num_proc=2, max_np=2).results
    assert second is None
    assert {tensor.device.type for tensor in first.weights.values()} == {"cpu"}
    assert first.weights["weight"].item() == pytest.approx(2.0, abs=0.01)
    assert [entry["rows"] for entry in first.history] == [4000, 4000]


def test_a_fit_that_wants_gpus_where_a_worker_has_none_is_an_error(rows: str) -> None:
    with pytest.raises(TrainingFailedError, match="useGpu=True, but Spark has assigned no GPU"):
        se.run(gpu_training.train_as_an_estimator, (plan(rows, True),), env={"SPARK_ELASTIC_DEVICE": "cpu"},
               local=True, num_proc=1)  # fmt: skip
    se.shutdown()


@pytest.mark.gpu
def test_batches_come_in_pinned_memory_and_reach_the_gpu_unharmed_while_it_is_busy(rows: str) -> None:
    """A batch that is dropped while its copy is under way must not give its memory to the next one."""
    loader = se.data.ParquetLoader(rows, 64, seed=3)
    expected = [batch["x"].clone() for batch in se.data.ParquetLoader(rows, 64, seed=3, pin_memory=False)]
    arrived = []
    for batch in loader:
        assert batch["x"].is_pinned()
        torch.cuda._sleep(1_000_000)
        arrived.append(batch["x"].to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    assert len(arrived) == len(expected)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(arrived, expected, strict=True))


@pytest.mark.gpu
def test_a_map_style_loader_pins_what_its_processes_have_read() -> None:
    loader = ElasticDataLoader(torch.arange(1000.0), 50, shuffle=False, num_workers=2, pin_memory=True)
    batches = [(batch.is_pinned(), batch.to("cuda", non_blocking=True)) for batch in loader]
    assert all(pinned for pinned, _ in batches)
    assert torch.equal(torch.cat([batch for _, batch in batches]).cpu(), torch.arange(1000.0))


def test_batches_that_are_read_ahead_are_those_of_the_epoch_on_the_device(rows: str, device: torch.device) -> None:
    loader = se.data.ParquetLoader(rows, 64, prefetch=8)
    total = sum(batch["x"].to(device, non_blocking=True).square().sum() for batch in loader)
    x = pq.read_table(rows.removeprefix("file://"))["x"].to_numpy()
    assert float(total) == pytest.approx(float(np.square(x).sum()), rel=1e-9)


def test_scoring_is_done_on_the_device(device: torch.device) -> None:
    pytest.importorskip("pyspark", reason="scoring is part of Spark's estimators, which need pyspark")
    from spark_elastic.estimator.scoring_device import scoring_device
    from spark_elastic.estimator.transform import Scorer

    assert scoring_device(None).type == "cpu", "no Spark task, no GPU that Spark has assigned"
    layout = Layout((Input(None, ("x",), expand=True),), (), None)
    torch.manual_seed(0)
    scorer = Scorer(torch.nn.Linear(1, 1).eval(), layout, lambda outputs: {"score": outputs[0]})
    column = np.linspace(-1, 1, 7, dtype=np.float32)
    on_cpu = scorer({"x": column})
    scorer.module.to(device)
    assert np.allclose(scorer({"x": column})["score"], on_cpu["score"], atol=1e-6)
    assert scorer.on_cpu().module.weight.device.type == "cpu"
