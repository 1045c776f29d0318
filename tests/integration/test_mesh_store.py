"""Gloo connects all ranks of a group through ``MeshStore``."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spark_elastic.driver.control_store import ControlStore
from spark_elastic.protocol.messages import StoreReply, StoreRequest
from spark_elastic.worker.torch_store import MeshStore, WorldStore

GENERATION = 7


class Control:
    """Stands for the connection to the driver."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self._driver = ControlStore()
        self._driver.open_generation(GENERATION)
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def store(
        self, operation: Any, keys: tuple[str, ...], values: tuple[bytes, ...] = (), amount: int = 0, *, generation: int
    ) -> StoreReply:
        answer: Future[StoreReply] = Future()
        with self._lock:
            self.operations.append(operation)
            request = StoreRequest(next(self._numbers), generation, operation, keys, values, amount)
            self._driver.handle(request, answer.set_result)
        return answer.result(timeout=30)


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
