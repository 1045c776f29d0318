"""What user code is told of its world, in a job and outside one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import spark_elastic
from spark_elastic.protocol.ticket import DEVICE_VARIABLE


def test_who_has_no_rank_is_told_of_fixed_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_elastic.worker.job._job", SimpleNamespace(world=None))
    with pytest.raises(spark_elastic.NotInWorldError, match="elastic=False"):
        spark_elastic.rank()


WORLD = SimpleNamespace(
    rank=3, size=6, generation=4, me=SimpleNamespace(local_rank=1, local_size=2, cross_rank=1, cross_size=3)
)


def test_each_function_tells_its_own_fact_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_elastic.worker.job._job", SimpleNamespace(world=WORLD))
    assert (spark_elastic.rank(), spark_elastic.size(), spark_elastic.generation()) == (3, 6, 4)
    assert (spark_elastic.local_rank(), spark_elastic.local_size()) == (1, 2)
    assert (spark_elastic.cross_rank(), spark_elastic.cross_size()) == (1, 3)
    assert spark_elastic.process_group() is torch.distributed.group.WORLD


def test_in_a_job_the_device_is_that_of_the_task_from_the_first_line_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch sees besides may be another worker's."""
    monkeypatch.setattr("spark_elastic.worker.job._job", SimpleNamespace(world=None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert spark_elastic.device() == torch.device("cpu")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda:0")
    assert spark_elastic.device() == torch.device("cuda", 0)


def test_outside_a_job_the_device_is_what_torch_finds_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert spark_elastic.device() == torch.device(device)
