"""Hosts: tasks and workers as processes, and what the supervisor and its warm parent do with workers."""

from __future__ import annotations

import asyncio
import platform
from functools import partial
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit

from simulation.product import seams
from simulation.world import threads
from simulation.world.machines import Executor
from simulation.world.process import Process
from simulation.world.universe import Universe
from spark_elastic.protocol import messages as m
from spark_elastic.protocol.messages import CommitId
from spark_elastic.task import service as task_service
from spark_elastic.worker.job import current_job
from spark_elastic.worker.process import main as worker_module

PYTHON = platform.python_version()
TICKET: Any = SimpleNamespace(run_id="simulated", addresses=(("driver", 1),), credentials=None, network_interface=None)


class InjectedError(Exception):
    """Raised in user code by a fault of the kind RAISE."""


class WorkerProcess(Process):
    """A training worker: ``run_worker`` on its main thread."""

    kind = "worker"

    def __init__(self, simulation: Universe, task: TaskProcess, number: int, token: str) -> None:
        super().__init__(simulation, task.machine, number)
        self.task = task
        self._token = token
        # Only the invariants read this.
        self.state: Any = None
        self.holds: CommitId | None = None
        # Whether the last sync has brought it its first commit.
        self.is_new = False
        self.stands_ready = False
        # How many seconds the worker will spend in user code before its next step.
        self.evaluation = 0.0
        # Whether the worker does nothing because one call holds the GIL.
        self.holds_gil = False
        simulation.workers[number] = self
        threads.Thread(self._main, process=self).start()

    def _main(self) -> None:
        self.pause(0.02, 0.3)
        try:
            code = worker_module.run_worker(TICKET, self.number, self._token, seams.of_worker(self, self.exit))
        except InjectedError:
            code = 1
        self.exit(code)

    def exit(self, code: int) -> None:
        self.kill(code)
        raise GreenletExit

    def pause(self, least: float, most: float) -> None:
        """Compute for a while."""
        threads.sleep(self.simulation.random.uniform(least, most) * self.machine.slowness)

    def reached(self, point: str) -> None:
        """Visit a named point of the protocol: faults may strike here, and other threads may run in between."""
        simulation = self.simulation
        simulation.points[point] += 1
        if point == "STEP" and self.evaluation:
            seconds, self.evaluation = self.evaluation, 0.0
            # A first step may take twice as long.
            threads.sleep(seconds if self.holds is None or self.holds.index else 2 * seconds)
        if point == "SYNCED" and self.is_new and current_job().world.newest_commit is not None:  # type: ignore[union-attr]
            simulation.strikes.newcomer_has_the_state(self)
        if point == "SYNCED":
            simulation.invariants.synced(self)
        if simulation.faults_at:
            simulation.strike_at(point, self)
            if not self.is_alive:
                raise GreenletExit
        if simulation.random.random() < 0.05:
            self.pause(0.0, 0.004)

    def _dying(self, code: int, freed: float) -> None:
        assert self.task.supervisor is not None
        self.task.supervisor.worker_dies(self, code, freed)


class TaskProcess(Process):
    """A Spark task, which runs only ``serve`` of the task's service."""

    kind = "task"

    def __init__(self, simulation: Universe, executor: Executor, number: int, slot: int, attempt: int) -> None:
        super().__init__(simulation, executor.machine, number)
        self.executor = executor
        self.slot = slot
        self.host: int | None = None
        self.supervisor: Supervisor | None = None
        self._attempt = attempt
        self.loop.call_soon(self._begin)

    @property
    def facts(self) -> m.HostFacts:
        return m.HostFacts(
            name=self.machine.name,
            address="10.0.0.1",
            pid=self.number,
            executor_pid=self.executor.number,
            python=PYTHON,
            torch="2",
            attempt=self._attempt,
        )

    def _begin(self) -> None:
        place = task_service.TaskPlace(self.slot, self._attempt)
        self.loop.create_task(
            task_service.serve(TICKET, place, seams.of_task(self, self.facts, partial(Supervisor, self)))
        ).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not self.is_alive or task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, task_service.TaskRestartError):
            self.unhandled(error)
        self.is_alive = False
        self.loop.is_dead = True
        self.machine.processes.remove(self)
        self.simulation.note("ends", self, "" if error is None else str(error))
        self.simulation.clock.soon(self._unwind)
        self._close_sockets()
        self.simulation.spark.task_ended(self, failed=error is not None)

    def _dying(self, code: int, freed: float) -> None:
        if self.supervisor is not None:
            self.supervisor.task_dies()
        self.simulation.clock.after(freed, self.simulation.spark.task_ended, self, True)


class Supervisor:
    """Stands in for ``WorkerSupervisor`` and its warm parent, which has a life of its own."""

    def __init__(self, task: TaskProcess, ticket: Any, connection: Any, environment: Any) -> None:
        self.task = task
        self.task.supervisor = self
        self.current: WorkerProcess | None = None
        self.pending: list[tuple[int, str]] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._driver = connection
        self._is_closing = False

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closing = True
        self.pending.clear()
        if self.current is not None:
            self.current.kill()
        while self.current is not None and not self.task.loop.is_dead:
            await asyncio.sleep(0.01)

    def start(self, worker: int, token: str) -> None:
        self.idle.clear()
        self.pending.append((worker, token))
        self._start_next()

    def kill(self, worker: int) -> None:
        if self.current is not None and self.current.number == worker:
            self.current.kill()
        elif any(number == worker for number, _ in self.pending):
            self.pending = [entry for entry in self.pending if entry[0] != worker]
            self._exited(worker, -9)

    async def rest(self) -> None:
        """Nothing is kept for another job."""

    def break_warm_parent(self) -> None:
        """Kill the warm parent; everything below it dies with it."""
        if self.task.is_alive and not self.broken.done():
            if self.current is not None:
                self.current.kill()
            self.broken.set_result("the warm parent ended")

    # ------------------------------------------------------------------ inside

    def _start_next(self) -> None:
        if self.current is None and self.pending and not self._is_closing:
            worker, token = self.pending.pop(0)
            self.current = WorkerProcess(self.task.simulation, self.task, worker, token)
            self._say(m.WorkerStarted(worker, worker))
            self._see(self.current)

    def _see(self, worker: WorkerProcess) -> None:
        """Report every second that a worker's process runs, unless it is stopped or has ended. One whose GIL is held runs."""
        if worker is self.current and worker.is_alive and self.task.is_alive:
            if not worker.loop.is_stopped or worker.holds_gil:
                self._say(m.WorkerSeen(worker.number))
            self.task.simulation.clock.after(1.0, self._see, worker, loop=self.task.loop)

    def worker_dies(self, worker: WorkerProcess, code: int, freed: float) -> None:
        clock, random = self.task.simulation.clock, self.task.simulation.random
        clock.after(random.uniform(0, 0.01), self._say, m.WorkerDying(worker.number))
        clock.after(freed + random.uniform(0, 0.02), self._reap, worker, code)

    def _reap(self, worker: WorkerProcess, code: int) -> None:
        self.current = None
        if self.task.is_alive:
            self.task.simulation.clock.after(
                self.task.simulation.random.uniform(0, 0.05), self._exited, worker.number, code, loop=self.task.loop
            )
            self._start_next()

    def _exited(self, worker: int, code: int) -> None:
        self._say(m.WorkerExited(worker, code, ("last words",)))
        if self.current is None and not self.pending:
            self.idle.set()

    def _say(self, message: m.Message) -> None:
        """Send through the task's loop, because a stopped task sends nothing."""
        self.task.loop.call_soon(self._driver.send, message)

    def task_dies(self) -> None:
        """The kernel signals the warm parent, which ends everything below it."""
        self.pending = []
        if self.current is not None:
            self.task.simulation.clock.after(self.task.simulation.random.uniform(0.0005, 0.05), self.current.kill)
