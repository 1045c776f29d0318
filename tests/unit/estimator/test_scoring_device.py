"""On which GPU a Spark task scores."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from spark_elastic.errors import SparkElasticError
from spark_elastic.estimator import scoring_device as scoring
from spark_elastic.estimator.scoring_device import place_of, scoring_device


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Each test is a process whose variables nobody has changed yet."""
    scoring._left_visible.cache_clear()


@pytest.mark.parametrize(
    ("visible", "count", "address", "number"),
    [
        (None, 2, "0", 0),
        (None, 2, "1", 1),
        (None, 1, "5", 0),  # in a container that has one GPU
        ("2,3", 2, "1", 1),
        ("5", 1, "5", 0),
        ("GPU-a", 1, "3", 0),
    ],
)
def test_a_number_counts_within_what_the_process_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, address: str, number: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert place_of(address) == number


@pytest.mark.parametrize(("visible", "address"), [("2,3", "3"), ("MIG-a,MIG-b", "MIG-c")])
def test_a_gpu_that_the_cluster_has_hidden_is_refused_as_in_training(
    monkeypatch: pytest.MonkeyPatch, visible: str, address: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(
        SparkElasticError, match=f"assigned GPU {address}, but CUDA_VISIBLE_DEVICES={visible} of this executor"
    ):
        place_of(address)


def test_a_model_that_insists_on_a_gpu_does_not_score_on_the_cpu_where_torch_cannot_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = SimpleNamespace(resources=lambda: {"gpu": SimpleNamespace(addresses=["0"])})
    monkeypatch.setattr(scoring.TaskContext, "get", lambda: task)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert scoring_device(None).type == "cpu"
    with pytest.raises(SparkElasticError, match=r"useGpu=True, but torch .* cannot use GPU 0"):
        scoring_device(True)


def test_the_id_of_a_slice_becomes_all_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert place_of("MIG-b") == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert place_of("MIG-b") == 0
    with pytest.raises(SparkElasticError, match=r"another GPU than MIG-a.*set spark.python.worker.reuse=false"):
        place_of("MIG-a")
