"""What a Spark task does for a job, from its registration to the end of the job."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import psutil

from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import Connection, ConnectionLostError, connect
from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE, TASK_VARIABLE
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task.decommission import executor_leaves
from spark_elastic.task.facts import gather_facts, worker_environment
from spark_elastic.task.leave import asked_to_leave, hold
from spark_elastic.task.supervisor import WorkerSupervisor

logger = logging.getLogger("spark_elastic")

# How long a released worker may run its exit handlers. Then its own control thread kills it.
GRACE_SECONDS = 1.0


class TaskRestartError(RuntimeError):
    """Raised by a Spark task on purpose, so that Spark starts the task again, perhaps on another executor."""


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """What the launcher's platform says about this attempt of the slot's task."""

    slot: int
    attempt: int = 0
    gpus: tuple[str, ...] = ()
    cpus: int = 1


async def ancestors_gone(generations: int = 2) -> None:
    """Wait until one of this process's nearest ancestors has ended. The process may live on, but it is no longer a host.

    Two ancestors of a Spark task belong to Spark: pyspark's daemon and the executor's JVM.
    """
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    watched = []
    for ancestor in psutil.Process().parents()[:generations]:
        try:
            descriptor = os.pidfd_open(ancestor.pid)
        except OSError:
            continue
        watched.append(descriptor)
        loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        for descriptor in watched:
            loop.remove_reader(descriptor)
            os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRuntime:
    """What a task's service uses of its process and the network. The defaults are the real functions."""

    connect: Callable[..., Awaitable[Connection]] = connect
    facts: Callable[..., m.HostFacts] = gather_facts
    environment: Callable[..., dict[str, str]] = worker_environment
    supervisor: Callable[..., WorkerSupervisor] = WorkerSupervisor
    # Returns when the processes to which this one belongs have ended.
    orphaned: Callable[[], Coroutine[object, object, None]] = ancestors_gone
    # Returns when the executor with this pid is being decommissioned.
    leaving: Callable[[int], Coroutine[object, object, None]] = executor_leaves
    # Returns a connection to `spark-elastic leave` once that runs on this machine.
    asked_to_leave: Callable[[], Coroutine[object, object, socket.socket]] = asked_to_leave


REAL_RUNTIME = TaskRuntime()


def run_task(ticket: Ticket, place: TaskPlace, runtime: TaskRuntime = REAL_RUNTIME) -> bool:
    """Serve as a host until the driver says that the job is over. Blocks the calling thread, which is the main thread.

    Returns True, or False at once if no driver listens, because the job is already over. Raises ``TaskRestartError`` if this
    host is at fault.
    """
    # asyncio.run would leave this Python process without an event loop, and Spark may run other code in it next.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(serve(ticket, place, runtime))
    finally:
        loop.run_until_complete(_end_what_is_left())
        loop.close()


async def _end_what_is_left() -> None:
    """End the tasks and threads of the loop, as ``asyncio.run`` would."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


async def serve(ticket: Ticket, place: TaskPlace, runtime: TaskRuntime = REAL_RUNTIME) -> bool:
    """Serve as a host until the driver releases this task or is gone. Return whether it took the host.

    Raises ``TaskRestartError``.
    """
    try:
        driver = await runtime.connect(list(ticket.addresses), ticket.credentials, m.ToTask)
    except ConnectionRefusedError:
        logger.info("the driver of run %s no longer listens: the job is over", ticket.run_id)
        return False
    except (ConnectionResetError, ConnectionAbortedError) as error:
        raise TaskRestartError(
            f"the driver at {_join(ticket.addresses)} was reached, but the connection ended in the handshake "
            f"({str(error) or 'it was closed'}). Are there too many connections from this machine's address, or does a firewall "
            "or proxy end them?"
        ) from error
    except OSError as error:
        raise TaskRestartError(
            f"cannot reach the driver at {_join(ticket.addresses)}: {error}. Is spark.driver.host reachable from the "
            "executors? Firewalls may want a fixed driver_port"
        ) from error
    try:
        facts = runtime.facts(driver.local_address, place.gpus, place.cpus, place.attempt)
        driver.send(m.TaskHello(place.slot, facts))
        try:
            welcome = await driver.receive()
        except ConnectionLostError:
            return False
        if not isinstance(welcome, m.Welcome):
            return False
        environment = runtime.environment(os.environ, welcome.env, place.gpus, place.cpus, sys.path)
        environment[EXECUTOR_VARIABLE], environment[TASK_VARIABLE] = str(facts.executor_pid), str(facts.pid)
        await _Host(ticket, driver, environment, facts.executor_pid, runtime).serve()
        return True
    finally:
        await driver.close()


class _Host:
    def __init__(
        self, ticket: Ticket, driver: Connection, environment: dict[str, str], executor: int, runtime: TaskRuntime
    ) -> None:
        self._runtime = runtime
        self._executor = executor
        self._ticket = ticket
        self._driver = driver
        self._environment = environment
        # Whether `spark-elastic leave` has asked the task to leave, and whether the driver has released it since.
        self._is_asked = False
        self._released = asyncio.Event()

    async def serve(self) -> None:
        async with self._runtime.supervisor(self._ticket, self._driver, self._environment) as supervisor:
            obeying = asyncio.ensure_future(self._obey(supervisor))
            orphaned = asyncio.ensure_future(self._runtime.orphaned())
            leaving = asyncio.ensure_future(self._tell_when_leaving())
            asked = asyncio.ensure_future(self._leave_when_asked())
            try:
                ends: set[asyncio.Future[Any]] = {obeying, supervisor.broken, orphaned, asked}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if supervisor.broken.done():
                    reason = supervisor.broken.result()
                    self._driver.send(m.TaskFailed(reason))
                    raise TaskRestartError(reason)
                for ended in (obeying, asked):
                    if ended.done():
                        ended.result()
            finally:
                for waiting in (obeying, orphaned, leaving, asked):
                    waiting.cancel()
                await asyncio.gather(obeying, orphaned, leaving, asked, return_exceptions=True)

    async def _tell_when_leaving(self) -> None:
        await self._runtime.leaving(self._executor)
        self._driver.send(m.TaskDraining())

    async def _leave_when_asked(self) -> None:
        """Have the worker leave when the command asks for it, and then hold the slot, so that no other worker starts here."""
        with await self._runtime.asked_to_leave() as command:
            self._is_asked = True
            self._driver.send(m.TaskDraining())
            await self._released.wait()
            await hold(command)

    async def _obey(self, supervisor: WorkerSupervisor) -> None:
        """Carry out the driver's commands until it releases the task or is gone."""
        async for message in self._driver.messages():
            match message:
                case m.Ping(number):
                    self._driver.send(m.Pong(number))
                case m.StartWorker(worker, token):
                    supervisor.start(worker, token)
                case m.KillWorker(worker):
                    supervisor.kill(worker)
                case m.RestartTask(reason):
                    raise TaskRestartError(reason)
                case m.ReleaseTask():
                    await _within(supervisor.idle.wait(), GRACE_SECONDS)
                    if not self._is_asked or self._released.is_set():
                        return
                    self._released.set()  # the slot is held; at the end of the job it is released once more


async def _within(waiting: Awaitable[object], seconds: float) -> None:
    try:
        await asyncio.wait_for(waiting, seconds)
    except asyncio.TimeoutError:
        pass


def _join(addresses: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in addresses)
