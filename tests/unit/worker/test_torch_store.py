"""Gloo connects all ranks of a group through ``MeshStore``."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from store_control import GENERATION, Control

from spark_elastic.worker.torch_store import MeshStore, WorldStore


@pytest.mark.parametrize("size", [1, 2, 11])
def test_gloo_connects_all_ranks_with_one_request_each_and_addresses_travel_along(size: int) -> None:
    control: Any = Control()
    found: dict[int, tuple[float, set[Any]]] = {}

    def connect(rank: int) -> None:
        store = MeshStore(WorldStore(control, GENERATION), rank, size, [("here", rank)])
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        found[rank] = (tensor.item(), store.addresses)
        together.wait()  # a rank that leaves early breaks the others' operations

    together = threading.Barrier(size)
    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: (float(size), {("here", other) for other in range(size)}) for rank in range(size)}
    assert control.operations == ["gather"] * size
