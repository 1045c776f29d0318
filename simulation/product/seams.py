"""What simulated processes run on: the product's own interfaces to the outside world, with the simulation behind them.

No part of the product is patched: driver, tasks and workers are passed stand-ins for clock, threads, network, processes,
launcher and disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from simulation.world import checkpoints, mesh, network, threads
from simulation.world.process import Process
from simulation.world.universe import Universe
from spark_elastic.driver.machine import DriverMachine
from spark_elastic.driver.runtime import DriverRuntime
from spark_elastic.driver.settings import JobSettings
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import HostFacts
from spark_elastic.task.service import TaskRuntime
from spark_elastic.worker import faults
from spark_elastic.worker.control import ControlClient
from spark_elastic.worker.job import current_job, enter_job
from spark_elastic.worker.runtime import Runtime


def of_driver(simulation: Universe, machine: Callable[[JobSettings, float], DriverMachine]) -> DriverRuntime:
    """Return what the driver's service runs on."""
    return DriverRuntime(
        clock=lambda: simulation.clock.now,
        new_event_loop=lambda: simulation.driver.loop,
        open_door=lambda address, port, credentials, accepted: _open_door(simulation, accepted),
        connection=_connection,
        machine=machine,
    )


def of_task(process: Process, facts: HostFacts, supervisor: Any) -> TaskRuntime:
    """Return what the service of a Spark task runs on."""
    return TaskRuntime(
        connect=partial(network.connect, process.simulation, process),
        facts=lambda *_: facts,
        environment=lambda *_: {},
        supervisor=supervisor,
        orphaned=_never,
        leaving=lambda executor: _never(),
        asked_to_leave=_never,
    )


def of_worker(process: Process, exit: Callable[[int], Any]) -> Runtime:
    """Return what a worker runs on."""
    simulation: Any = process.simulation
    return Runtime(
        clock=lambda: simulation.clock.now,
        threads=threads.THREADING,
        future=threads.Future,  # type: ignore[arg-type]
        new_event_loop=lambda: process.loop,  # type: ignore[arg-type,return-value]
        call_in_loop=threads.run_coroutine_threadsafe,  # type: ignore[arg-type]
        pid=lambda: 1,
        exit=exit,
        connect=partial(network.connect, simulation, process),
        prepare=lambda: None,
        end_program=lambda beat: None,
        end_failed_program=lambda: None,
        control=Control,
        group=mesh.Group,  # type: ignore[arg-type]
        checkpoints=checkpoints.Writer,
        set_pin=lambda pin: None,
        gpu=lambda: None,
        injector=lambda plan, claim: _reached,
    )


class Control(ControlClient):
    """The control client, which tells the simulation what its process does."""

    def failed(self, error: BaseException, fatal: bool = False) -> None:
        """Report an error. A killed process unwinds here, too, but sends nothing."""
        if threads.current().process.is_alive:
            super().failed(error, fatal)

    def ready(self, reason: str) -> Any:
        process = threads.current().process
        process.stands_ready = True
        order = super().ready(reason)
        process.stands_ready = False
        return order


def _open_door(simulation: Universe, accepted: Any) -> Any:
    simulation.door = network.Door(accepted)
    return simulation.door


def _connection(reader: Any, writer: Any, expected: Any) -> Any:
    """Return the driver's end of a connection. It stands in for reader and writer, too."""
    writer.expected = expected
    return writer


def _reached(point: Point, *_: Any) -> None:
    threads.current().process.reached(point.name)


async def _never() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing ends this")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the product's log silent, and restore the product's process-wide state afterwards."""
    logger = logging.getLogger("spark_elastic")
    level, job = logger.level, current_job()
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
        enter_job(job)
        faults.arm()
