"""One simulated job, from ``run()`` to the end of the last process."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import msgspec

from simulation.checks.invariants import Invariants, WatchedMachine
from simulation.checks.ledger import Ledger
from simulation.faults.schedule import Schedule
from simulation.faults.strikes import Strikes
from simulation.product import seams
from simulation.product.hosts import WorkerProcess
from simulation.product.spark import Spark
from simulation.product.training import train
from simulation.world.machines import Machine
from simulation.world.mesh import Mesh
from simulation.world.network import Link
from simulation.world.process import Process
from simulation.world.universe import Universe
from spark_elastic.checkpoint.naming import KEPT
from spark_elastic.driver.machine import DriverMachine
from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.sizing import Sizing
from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.records import Record
from spark_elastic.protocol.ticket import CheckpointPlan, Payload

# How many seconds a job may take to end once the last fault has healed, and its processes after it.
JOB_SECONDS = 250.0
END_SECONDS = 60.0
EVENT_LIMIT = 200_000

TIMEOUTS: dict[str, Any] = {
    "start_timeout": 60.0,
    "elastic_timeout": 60.0,
    "hang_timeout": 6.0,
    "heartbeat_timeout": 4.0,
    "ready_timeout": 2.0,
    "form_timeout": 5.0,
    "join_window": 0.25,
    "join_patience": 3.0,
    "yield_after": 10.0,
}
_CALL = cloudpickle.dumps((train, (), {}, tuple(sys.argv)))


class _Log:
    def record(self, record: Record) -> None: ...


class Simulation(Universe):
    """Plays one schedule. ``violation`` says what was found to be wrong; empty if nothing was."""

    def __init__(self, schedule: Schedule, *, keep_history: bool = False) -> None:
        self.schedule = schedule
        super().__init__(schedule.seed, keep_history)
        self.ledger = Ledger()
        self._meshes: dict[int, Mesh] = {}
        self._healed_at = self.clock.now
        job = schedule.job
        backend = "nccl" if job.on_gpu else "gloo"
        self.settings = JobSettings(
            min_np=job.min_np,
            num_proc=job.num_proc,
            max_np=job.max_np,
            durable=job.durable,
            backend=backend,
            replace_slow=0.5 if job.replaces_slow else None,
            reset_limit=job.reset_limit,
            adaptive_np=job.adapts,
            **TIMEOUTS,
        )
        self.driver = Process(self, Machine("driver"), 0)
        self.driver.kind = "driver"
        self.strikes = Strikes(self)
        self.machine: WatchedMachine
        self.spark: Spark
        self.service: SparkDriverService
        self.invariants: Invariants

    # ------------------------------------------------------------------ the run

    def run(self) -> Simulation:
        """Play the schedule to its end, or to the first violation."""
        self._set_up()
        self.clock.run(self._is_decided, self._deadline(), EVENT_LIMIT)
        while not self._is_decided() and self.clock.now < self._deadline() and self.clock.events < EVENT_LIMIT:
            before = self.clock.events
            self.clock.run(self._is_decided, self._deadline(), EVENT_LIMIT)
            if self.clock.events == before:
                break
        if not self.violation and not self.service.outcome.done():
            self._explain_hang()
        self._finish()
        self._tear_down()
        return self

    def _set_up(self) -> None:
        job = self.schedule.job
        plan = CheckpointPlan("memory://", 1, 0.5, KEPT) if job.durable else None
        payload = msgspec.msgpack.encode(Payload(_CALL, self.settings.form_timeout, self.settings.max_np, (), plan))
        self.spark = Spark(self, job.machines, job.executors, job.cores, job.max_np)
        credentials: Any = None
        log: Any = _Log()
        self.service = SparkDriverService(
            self.settings,
            credentials,
            event_log=log,
            runtime=seams.of_driver(self, self._make_machine),
        )
        self.service.begin(payload, self.spark)
        self.service.outcome.add_done_callback(lambda outcome: self.clock.soon(self._decided))
        self.driver.loop.create_task(self.service.start())
        self.spark.submit_all()
        for fault in self.schedule.faults:
            if fault.follows is not None:
                continue
            if fault.point is None:
                self.heals(self.clock.now + fault.at)
                self.clock.after(fault.at, self.strikes.strike, fault, None)
            else:
                self.faults_at.setdefault(fault.point, []).append(fault)

    def _make_machine(self, settings: JobSettings, now: float) -> DriverMachine:
        self.machine = WatchedMachine(settings, now)
        # Jobs are too short for several measurements of each size.
        self.machine.job.sizing = Sizing(settings.adaptive_np, settings.min_np, warm_up=0, measurements=1)
        self.invariants = self.machine.watch = Invariants(self, self.machine)
        return self.machine

    def _decided(self) -> None:
        """Do what ``run()`` does once there is an outcome."""
        self.is_over = True
        self.note("has", "the job", repr(self.service.outcome.exception() or "finished"))
        self.clock.after(self.random.uniform(0.0, 0.2), self._close)

    def _close(self) -> None:
        self.spark.submit_no_more()
        self.driver.loop.call_soon(lambda: self.driver.loop.create_task(self.service.close()))

    def _finish(self) -> None:
        if self.violation:
            return
        error = self.service.outcome.exception()
        if error is None:
            self.invariants.finished(self.service.outcome.result())
        else:
            assert isinstance(error, SparkElasticError)
            self.invariants.failed(error)
        if self.violation:
            return
        until = max(self.clock.now, self._healed_at) + END_SECONDS
        self.clock.run(
            lambda: (not self.spark.living() and not self.door.is_open) or bool(self.violation), until, EVENT_LIMIT
        )
        if not self.violation:
            self.invariants.ended()

    def _tear_down(self) -> None:
        """Leave nothing behind that could affect the next simulation."""
        for process in self.processes:
            process.is_alive = False
            process.loop.is_dead = True
            process._unwind()

    def _is_decided(self) -> bool:
        return self.is_over or bool(self.violation)

    def _deadline(self) -> float:
        return max(self._healed_at, 100.0) + JOB_SECONDS

    def _explain_hang(self) -> None:
        job = self.machine.job
        world = job.world
        what = "no world" if world is None else f"generation {world.generation} is {world.phase.name}"
        workers = ", ".join(f"{worker.worker} {worker.phase.name}" for worker in job.workers.values())
        self.fail(
            f"the job does not end: at {self.clock.now:.1f} s, after {self.clock.events} events, {what}; "
            f"workers: {workers or 'none'}; hosts: {len(job.hosts)}"
        )

    # ------------------------------------------------------------------ for the parts

    def strike_at(self, point: str, worker: WorkerProcess) -> None:
        """Let those faults strike that wait for this visit to the point."""
        for fault in self.faults_at.get(point, ()):
            if fault.nth == self.points[point]:
                self.strikes.strike(fault, worker)

    def heals(self, when: float) -> None:
        """Note until when a fault has consequences for which nobody is to blame."""
        self._healed_at = max(self._healed_at, when)

    def delay(self, link: Link) -> float:
        """Return how many seconds a message takes."""
        dice = self.random.random()
        seconds = 0.0003 + dice * 0.003 if dice < 0.95 else dice * 0.1
        return seconds + link.lag * self.random.random()

    def mesh(self, generation: int, size: int) -> Mesh:
        if generation not in self._meshes:
            self._meshes[generation] = Mesh(self, generation, size)
        return self._meshes[generation]
