"""Puts what is simulated in the place of what is real, for as long as a simulation runs. These are all such places."""

from __future__ import annotations

import asyncio
import functools
import logging
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from simulation import checkpoints, mesh, network, processes, threads
from simulation.invariants import WatchedMachine
from spark_elastic.data import tracker
from spark_elastic.data.order import EpochOrder
from spark_elastic.driver import service
from spark_elastic.protocol.fault_points import Point
from spark_elastic.task import service as task_service
from spark_elastic.worker import control, faults, group, reporting, world
from spark_elastic.worker import job as job_module
from spark_elastic.worker import main as worker_main
from spark_elastic.worker.checks import fingerprint
from spark_elastic.worker.state import repair


def _asyncio(**replaced: Any) -> Any:
    """The module asyncio with a few names replaced."""
    module = types.ModuleType("asyncio")
    module.__dict__.update({**vars(asyncio), **replaced})
    return module


def _process() -> Any:
    return asyncio.get_running_loop().process  # type: ignore[attr-defined]


async def _connect(addresses: Any, credentials: Any, expected: Any) -> Any:
    process = _process()
    return await network.connect(process.simulation, process, expected)


def _connection(reader: Any, writer: Any, expected: Any) -> Any:
    """The driver's end of a connection stands for reader and writer, too."""
    writer.expected = expected
    return writer


def _reached(point: Point, **where: Any) -> None:
    threads.current().process.reached(point.name)


def _exit(code: int) -> None:
    threads.current().process.exit(code)


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


def _failed(real: Any, client: Any, error: BaseException, fatal: bool = False) -> None:
    """A killed process unwinds here, too, but has nothing to say."""
    if threads.current().process.is_alive:
        real(client, error, fatal)


def _ready(real: Any, client: Any, reason: str) -> Any:
    process = threads.current().process
    process.stands_ready = True
    order = real(client, reason)
    process.stands_ready = False
    return order


@contextmanager
def installed(clock: Any) -> Iterator[None]:
    """Have this Python process simulate. ``clock`` returns the simulation whose time is told."""
    of_worker = _asyncio(
        new_event_loop=lambda: threads.current().process.loop,
        run_coroutine_threadsafe=threads.run_coroutine_threadsafe,
    )
    of_driver = _asyncio(new_event_loop=lambda: clock().driver.loop)
    real_order, real_failed, real_ready = EpochOrder, control.ControlClient.failed, control.ControlClient.ready

    @functools.lru_cache(maxsize=1000)
    def orders(rows: bytes, epoch: int, spec: Any) -> Any:
        return real_order(np.frombuffer(rows, np.int64), epoch, spec)

    replacements: list[tuple[Any, str, Any]] = [
        (control, "asyncio", of_worker),
        (control, "threading", threads.THREADING),
        (control, "concurrent", SimpleNamespace(futures=SimpleNamespace(Future=threads.Future))),
        (control, "os", SimpleNamespace(getpid=lambda: 1, _exit=_exit)),
        (control, "connect", _connect),
        (control, "keep_from_children", lambda descriptor: None),
        (control.ControlClient, "failed", lambda client, *args, **named: _failed(real_failed, client, *args, **named)),
        (control.ControlClient, "ready", lambda client, reason: _ready(real_ready, client, reason)),
        (group, "threading", threads.THREADING),
        (world, "Group", mesh.Group),
        (repair, "dist", mesh.DIST),
        (worker_main, "_reseed", lambda: None),
        (worker_main, "set_pin", lambda pin: None),
        (worker_main, "CheckpointWriter", checkpoints.Writer),
        (logging, "basicConfig", lambda **_: None),
        (faults, "reached", _reached),
        (tracker, "EpochOrder", lambda rows, epoch, spec: orders(rows.tobytes(), epoch, spec)),
        (service, "asyncio", of_driver),
        (fingerprint, "time", SimpleNamespace(monotonic=lambda: clock().clock.now)),
        (reporting, "time", SimpleNamespace(monotonic=lambda: clock().clock.now)),
        (service, "time", SimpleNamespace(monotonic=lambda: clock().clock.now)),
        (service, "DriverMachine", WatchedMachine),
        (service, "Connection", _connection),
        (task_service, "connect", _connect),
        (task_service, "gather_facts", lambda *_: _process().facts),
        (task_service, "worker_environment", lambda *_: {}),
        (task_service, "WorkerSupervisor", processes.Supervisor),
        (task_service, "_ancestors_gone", _never),
    ]
    logger = logging.getLogger("spark_elastic")
    before, job = logger.level, job_module._job
    with ExitStack() as stack:
        for place, name, replacement in replacements:
            stack.enter_context(mock.patch.object(place, name, replacement))
        logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            logger.setLevel(before)
            job_module._job = job
