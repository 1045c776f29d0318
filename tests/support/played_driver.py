"""The driver as a task sees it, and a supervisor whose worker has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from spark_elastic.protocol import messages as m
from spark_elastic.task.service import TaskRuntime


class Driver:
    """The driver as a task sees it."""

    local_address = "127.0.0.1"

    def __init__(self) -> None:
        self.orders: asyncio.Queue[m.Message] = asyncio.Queue()
        self.told: asyncio.Queue[m.Message] = asyncio.Queue()
        self.send = self.told.put_nowait

    async def receive(self) -> m.Message:
        return m.Welcome(1, {})

    async def messages(self) -> AsyncIterator[m.Message]:
        while True:
            yield await self.orders.get()

    async def close(self) -> None:
        pass


class Supervisor:
    """A supervisor whose worker has ended."""

    def __init__(self, *_: object) -> None:
        self.idle, self.broken = asyncio.Event(), asyncio.get_running_loop().create_future()
        self.idle.set()

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.broken.cancel()


async def never(*_: object) -> None:
    await asyncio.get_running_loop().create_future()


def runtime_for(driver: Driver) -> TaskRuntime:
    async def connected(*_: object) -> Any:
        return driver

    facts: Any = SimpleNamespace(executor_pid=1, pid=2)
    return TaskRuntime(
        connect=connected, facts=lambda *_: facts, environment=lambda *_: {}, supervisor=Supervisor,  # type: ignore[arg-type]
        orphaned=never, leaving=never,
    )  # fmt: skip
