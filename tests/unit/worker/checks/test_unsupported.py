"""What a State cannot hold is said in one sentence, at construction or at the first commit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worker_stage import on_stage

from spark_elastic.worker.state.torch_state import TorchState


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def meta() -> torch.Tensor:
    return torch.empty(3, device="meta")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (sparse, "a sparse tensor"),
        (nested, "a nested tensor"),
        (quantized, "a quantized tensor"),
        (meta, "a tensor without data"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"graph is {words}.*which a State does not support"):
        TorchState(graph=make())
    with pytest.raises(TypeError, match=f"graph is {words}"):
        TorchState(graph=[{"a": make()}])
    module = torch.nn.Linear(1, 1)
    module.register_buffer("table", make())
    with pytest.raises(TypeError, match=f"model.table is {words}"):
        TorchState(model=module)


@pytest.mark.filterwarnings("ignore")
def test_those_that_are_set_later_are_refused_at_the_next_commit() -> None:
    state = TorchState()
    state.graph = nested()
    with pytest.raises(TypeError, match="a nested tensor, which a State does not support"):
        state.commit()


def test_a_model_whose_shapes_come_with_its_first_call_is_refused_until_then() -> None:
    model = torch.nn.LazyLinear(2)
    with pytest.raises(
        TypeError, match=r"model\.weight is a parameter that has no shape .*: call the model once, with a batch"
    ):
        TorchState(model=model)
    model(torch.ones(1, 3))
    TorchState(model=model).commit()


@pytest.mark.filterwarnings("ignore")
def test_dtensors_and_torchs_sharded_optimizer_are_refused(group: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"weight is a DTensor, as FSDP.*goes into a spark_elastic\.ShardedState"):
        TorchState(weight=tensor)
    optimizer = ZeroRedundancyOptimizer(torch.nn.Linear(1, 1).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer is torch's.*write spark_elastic.ZeroRedundancyOptimizer"):
        TorchState(optimizer=optimizer)
    state = TorchState()
    state.optimizer = optimizer
    with pytest.raises(TypeError, match="torch's ZeroRedundancyOptimizer"):
        state.commit()


def test_a_metric_whose_values_no_commit_would_keep_is_refused_and_one_within_a_model_is_not() -> None:
    import torchmetrics

    for metric in (torchmetrics.SumMetric(), torchmetrics.MetricCollection([torchmetrics.SumMetric()])):
        with pytest.raises(
            TypeError,
            match=r"rows is a torchmetrics metric whose values .* persistent\(True\) and give it",
        ):
            TorchState(rows=metric)
    kept = torchmetrics.SumMetric()
    kept.persistent(True)
    with pytest.raises(
        TypeError, match=r"rows is a torchmetrics metric, of this rank's rows only, .* give it under local="
    ):
        TorchState(rows=[kept])
    later = TorchState()
    later.rows = kept
    with pytest.raises(TypeError, match="rows is a torchmetrics metric, of this rank's rows only"):
        later._begin(None)
    state = TorchState(local={"rows": kept})
    kept.update(3.0)
    state.commit()
    kept.update(4.0)
    state.restore()
    assert kept.compute() == 3.0
    model = torch.nn.Linear(1, 1)
    model.accuracy = torchmetrics.MeanMetric()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchState(model=model).commit()
    model.accuracy.persistent(True)
    with pytest.warns(
        UserWarning, match=r"model\.accuracy is a torchmetrics metric, .* call persistent\(False\)"
    ) as told:
        TorchState(model=model)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchState(local={"model": model})


def test_a_metric_that_comes_into_the_state_later_is_refused_with_what_helps() -> None:
    import torchmetrics

    with on_stage() as stage:
        state = TorchState(model=torch.nn.Linear(1, 1))
        state._prepare()
        stage.begin(state)
        state.rows = torchmetrics.MeanMetric()
        state.rows.persistent(True)
        with pytest.raises(TypeError, match=r"state\.rows is a torchmetrics metric, of this rank's rows only"):
            state.commit()
