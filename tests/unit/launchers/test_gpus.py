"""Which GPUs there are, and which of them a worker gets."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from spark_elastic.launchers.gpus import find_gpus, gpu_at, visible_gpus
from spark_elastic.task import facts


@pytest.mark.parametrize(
    ("listed", "found"),
    [("0,1", ("0", "1")), ("GPU-1a2b, 3", ("GPU-1a2b", "3")), ("", ()), ("-1", ()), ("2,-1,3", ("2",))],
)
def test_cuda_visible_devices_is_read_as_cuda_does(listed: str, found: tuple[str, ...]) -> None:
    assert visible_gpus(listed) == found


@pytest.mark.usefixtures("two_gpus")
def test_a_torch_for_cpus_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_gpus() == ("GPU-a", "GPU-b")
    monkeypatch.setattr(facts.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert find_gpus() == ()


@pytest.mark.usefixtures("two_gpus")
def test_where_there_is_no_torch_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(facts.importlib.metadata, "version", version)
    assert find_gpus() == ()


@pytest.mark.parametrize(
    ("address", "visible", "value"),
    [
        ("1", None, "1"),
        ("MIG-1c2d/3/0", None, "MIG-1c2d/3/0"),
        ("1", "2,3", "3"),
        ("0", "MIG-a,MIG-b", "MIG-a"),
        ("1", "GPU-a,GPU-b", "GPU-b"),
        ("MIG-b", "MIG-a,MIG-b", "MIG-b"),
        ("GPU-b", "0,1", "GPU-b"),  # nobody can tell these apart but CUDA
        ("5", "5", "5"),  # the cluster hides all other GPUs
        ("5", "GPU-a", "GPU-a"),
    ],
)
def test_an_assigned_gpu_is_one_of_those_that_the_cluster_has_left_visible(
    address: str, visible: str | None, value: str
) -> None:
    assert gpu_at(address, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == value


@pytest.mark.parametrize(("address", "visible"), [("2", "2,3"), ("0", ""), ("0", "-1"), ("MIG-c", "MIG-a,MIG-b")])
def test_a_gpu_that_the_cluster_has_hidden_is_refused(address: str, visible: str) -> None:
    with pytest.raises(
        ValueError, match=rf"assigned GPU {address}, but CUDA_VISIBLE_DEVICES={visible} of this executor"
    ):
        gpu_at(address, {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_the_user_has_left_visible_are_those_that_there_are() -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ("1",)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert find_gpus({}) == ("GPU-a", "GPU-b")


@pytest.mark.usefixtures("two_gpus")
def test_a_driver_that_does_not_answer_has_no_gpus(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-a\nexit 9\n")
    assert find_gpus({}) == ()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\n")
    assert find_gpus({}) == ()
