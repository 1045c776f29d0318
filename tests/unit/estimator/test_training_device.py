"""On which device a worker of a fit trains."""

from __future__ import annotations

import pytest
import torch

import spark_elastic as se
from spark_elastic.errors import SparkElasticError
from spark_elastic.estimator.training_device import training_device

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("use_gpu", "is_usable", "assigned", "chosen"),
    [
        (None, True, GPU, GPU),
        (True, True, GPU, GPU),
        (False, True, GPU, CPU),
        (None, False, GPU, CPU),  # torch has been built without CUDA
        (None, True, CPU, CPU),  # Spark has assigned none
        (False, False, CPU, CPU),
    ],
)
def test_a_worker_trains_on_the_gpu_of_its_task_unless_the_user_wants_none(
    use_gpu: bool | None,
    is_usable: bool,
    assigned: torch.device,
    chosen: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_usable)
    monkeypatch.setattr(se, "device", lambda: assigned)
    assert training_device(use_gpu) == chosen


@pytest.mark.parametrize(("is_usable", "assigned"), [(False, GPU), (True, CPU)])
def test_a_fit_that_insists_on_a_gpu_does_not_train_without_one(
    is_usable: bool, assigned: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_usable)
    monkeypatch.setattr(se, "device", lambda: assigned)
    with pytest.raises(SparkElasticError, match=r"useGpu=True, but Spark has assigned no GPU that torch .* can use"):
        training_device(True)
