"""A worker's connection to the driver's control store, within one process."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any

from spark_elastic.driver.control_store import ControlStore
from spark_elastic.protocol.messages import StoreReply, StoreRequest

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
