"""Jobs on a GPU, in processes of this machine, without Java and Spark. ``--on cpu`` has the CPU stand in for it.

``make gpu`` runs these tests; ``make test`` does not, as machines that build have no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import gpu_training
import pytest
import torch
from descendants import descendants
from jobs import runner
from settling import assert_settles

from spark_elastic.launchers.gpus import find_gpus
from spark_elastic.launchers.local_cluster import LocalCluster

SEATS = 4
SETTLE_SECONDS = 15.0

cloudpickle.register_pickle_by_value(gpu_training)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=("cuda", "cpu"), default="cpu", help="where the tests of tests/gpu run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what the CPU cannot stand in for."""
    if where(config) == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def where(config: pytest.Config) -> str:
    # Other tests may be run beside these, and then this option is unknown.
    return str(config.getoption("--on", "cpu"))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """The device that these tests are about."""
    return torch.device(where(pytestconfig))


@pytest.fixture(scope="session")
def gpus(device: torch.device) -> tuple[str, ...]:
    """The GPUs of this machine; none where the CPU stands in."""
    found = find_gpus() if device.type == "cuda" else ()
    assert found or device.type == "cpu", "local slots find GPUs by nvidia-smi, and it is missing or names none"
    return found


@pytest.fixture(scope="session")
def one_device(gpus: tuple[str, ...]) -> Iterator[LocalCluster]:
    """Four seats that share one GPU, so that workers talk over Gloo: NCCL refuses two ranks on one GPU."""
    with contextlib.closing(LocalCluster(SEATS, gpus[:1] * SEATS)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def alone(gpus: tuple[str, ...]) -> Iterator[LocalCluster]:
    """One seat with a GPU of its own: a world of one over NCCL."""
    with contextlib.closing(LocalCluster(1, gpus[:1])) as cluster:
        yield cluster


@pytest.fixture
def run(one_device: LocalCluster) -> Callable[..., Any]:
    """``run(fn, *args, faults=[…], **settings)``: results and events of a run on the one device."""
    return runner(local=one_device)


@pytest.fixture
def run_alone(alone: LocalCluster) -> Callable[..., Any]:
    """The same in a world of one."""
    return runner(local=alone)


@pytest.fixture
def run_on_all(gpus: tuple[str, ...]) -> Iterator[Callable[..., Any]]:
    """The same with a GPU for each worker, over NCCL."""
    if len(gpus) < 2:
        pytest.skip(f"needs two GPUs, and there are {len(gpus)}")
    with contextlib.closing(LocalCluster(len(gpus), gpus)) as cluster:
        yield runner(local=cluster)


@pytest.fixture(autouse=True)
def nothing_left(one_device: LocalCluster, alone: LocalCluster) -> Iterator[None]:
    """After each test no process may be there that was not there before, but those that slots are forked from."""
    before = set(descendants())
    yield
    kept = one_device.pids | alone.pids
    assert_settles(
        lambda: {process for process in set(descendants()) - before if process.pid not in kept}, SETTLE_SECONDS
    )
