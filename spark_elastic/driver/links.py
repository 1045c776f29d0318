"""The driver's connections: to tasks, to workers, and to tasks that wait for a slot to become vacant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from spark_elastic.driver.samples import WorkerSamples
from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import Connection
from spark_elastic.worker.backends import HOST_BACKEND


@dataclass(slots=True)
class TaskLink:
    """The connection to the task of a host."""

    host: int
    facts: m.HostFacts
    connection: Connection
    closing: asyncio.Task[None] | None = None
    samples: WorkerSamples = field(default_factory=WorkerSamples)


@dataclass(slots=True)
class WorkerLink:
    """The connection to a worker, and the part of its result that has arrived."""

    worker: int
    connection: Connection
    # Whether the announced result is that of an elastic function; None until a result is announced.
    elastic_result: bool | None = None
    result: bytearray = field(default_factory=bytearray)


def choose_backend(tasks: Sequence[TaskLink | None]) -> str:
    """Return nccl if every task has a GPU of its own that its torch can use, else gloo. None stands for a task that is gone."""
    facts = [task.facts for task in tasks if task is not None]
    gpus = [(each.name, each.gpus[0]) for each in facts if each.gpus and m.uses_gpus(each.torch)]
    return "nccl" if len(set(gpus)) == len(tasks) else HOST_BACKEND


class Standby:
    """Speculative duplicates of a slot's task, which wait until the original is gone.

    If a duplicate ended, Spark would consider the slot's work done and kill the original.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    async def wait(self, slot: int, connection: Connection) -> bool:
        """Wait until the slot is vacant. Return False if the duplicate went away first."""
        vacant = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(slot, [])
        waiting.append(vacant)
        silence = asyncio.ensure_future(connection.receive())
        await asyncio.wait({vacant, silence}, return_when=asyncio.FIRST_COMPLETED)
        silence.cancel()
        await asyncio.gather(silence, return_exceptions=True)
        waiting.remove(vacant)
        return vacant.done() and not vacant.cancelled()

    def vacate(self, slot: int) -> None:
        """Wake all duplicates that wait for a slot; the first to look takes it."""
        for vacant in self._waiting.pop(slot, []):
            if not vacant.done():
                vacant.set_result(None)

    def close(self) -> None:
        """Stop all waiting, because no slot will become vacant any more."""
        for waiting in self._waiting.values():
            for vacant in waiting:
                vacant.cancel()
