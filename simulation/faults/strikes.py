"""What each kind of fault does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent

from simulation.faults.schedule import Kind, SimulatedFault
from simulation.product.hosts import InjectedError, TaskProcess, WorkerProcess
from simulation.world import threads
from simulation.world.machines import Executor, Machine
from simulation.world.universe import Universe
from spark_elastic.errors import JobCancelledError
from spark_elastic.worker.job import current_job

# Holding the GIL for less than this, which is shorter than hang_timeout and form_timeout, explains no loss.
BRIEF_SECONDS = 5.0
# The longest time of an evaluation: more than ready_timeout and less than hang_timeout.
EVALUATION_SECONDS = 4.5
# A little more than twice hang_timeout, which is how long a world that waits for lost packets lasts.
BLACK_HOLE_SECONDS = 15.0


class Strikes:
    """Carries out faults, and knows which workers were hit: their loss needs no other explanation."""

    def __init__(self, simulation: Universe) -> None:
        self.simulation = simulation
        # Workers, tasks, executors and machines that were struck.
        self.hit: set[object] = set()
        self.struck: list[SimulatedFault] = []
        self._hung: set[WorkerProcess] = set()
        self._stopped: set[WorkerProcess] = set()

    def strike(self, fault: SimulatedFault, here: WorkerProcess | None) -> None:  # noqa: C901
        """Let a fault strike the worker that has come to its point, or a picked one."""
        simulation = self.simulation
        if simulation.is_over:
            return
        worker = here
        if here is None or fault.other:
            others = [worker for worker in simulation.workers.values() if worker.is_alive and worker is not here]
            worker = self._pick(others, fault)
        self.struck.append(fault)
        simulation.note("strikes", worker or "the job", str(fault))
        for follower in simulation.schedule.faults:
            if follower.follows is not None and follower.number == fault.number + 1:
                simulation.heals(simulation.clock.now + follower.follows)
                simulation.clock.after(follower.follows, self.strike, follower, None)
        action = getattr(self, f"_{fault.kind.name.lower()}")
        if fault.kind in _ON_THE_JOB:
            action(fault)
        elif fault.kind in _ON_A_TASK:
            task = worker.task if worker is not None else self._pick(self._tasks(), fault)
            if task is not None:
                self.hit.add(task)
                action(task, fault)
        elif fault.kind in _ON_AN_EXECUTOR:
            executor = worker.task.executor if worker is not None else self._pick(simulation.spark.executors, fault)
            if executor is not None and executor.is_alive:
                self.hit.add(executor)
                action(executor, fault)
        elif fault.kind in _ON_A_MACHINE:
            machine = worker.machine if worker is not None else self._pick(simulation.spark.machines, fault)
            assert machine is not None
            self.hit.add(machine)
            action(machine, fault)
        elif worker is not None:
            if not (fault.kind is Kind.HOLD_GIL and fault.seconds < BRIEF_SECONDS):
                self.hit.add(worker)
            action(worker, fault)

    def is_gone_for_good(self, worker: WorkerProcess) -> bool:
        """Whether this worker is alive but will never continue."""
        return worker in self._hung or worker in self._stopped or worker.machine.is_lost

    def is_hit(self, worker: WorkerProcess) -> bool:
        """Whether a fault explains the loss of this worker."""
        task = worker.task
        return not self.hit.isdisjoint((worker, task, task.executor, task.machine))

    def _tasks(self) -> list[TaskProcess]:
        return [task for executor in self.simulation.spark.executors for task in executor.tasks]

    @staticmethod
    def _pick(choices: Sequence[Any], fault: SimulatedFault) -> Any:
        return choices[fault.pick % len(choices)] if choices else None

    def _later(self, fault: SimulatedFault, call: Callable[..., Any], *args: Any) -> None:
        self.simulation.heals(self.simulation.clock.now + fault.seconds)
        self.simulation.clock.after(fault.seconds, call, *args)

    # ------------------------------------------------------------------ workers

    def _kill(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        worker.kill()

    def _exit(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        worker.kill(fault.pick % 3)

    def _raise(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        if self._is_here(worker):
            raise InjectedError(f"row {fault.pick}")
        worker.kill(1)

    def _stop(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        worker.stop()
        self._later(fault, worker.go_on)
        self._hold(worker)

    def _hold_gil(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        worker.holds_gil = True
        worker.stop()
        self._later(fault, self._release_gil, worker)
        self._hold(worker)

    def _release_gil(self, worker: WorkerProcess) -> None:
        worker.holds_gil = False
        worker.go_on()

    def _stop_for_ever(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        self._stopped.add(worker)
        worker.stop()
        self._hold(worker)

    def _long_code(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        if self._is_here(worker):
            self.simulation.heals(self.simulation.clock.now + fault.seconds)
            threads.sleep(fault.seconds)

    def _long_code_beating(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        if self._is_here(worker):
            self.simulation.heals(self.simulation.clock.now + fault.seconds)
            for _ in range(int(fault.seconds)):
                threads.sleep(1.0)
                if worker.state is not None:
                    worker.state.heartbeat()

    def _evaluate(self, fault: SimulatedFault) -> None:
        for worker in self.simulation.workers.values():
            worker.evaluation = min(fault.seconds, EVALUATION_SECONDS)
        self.simulation.heals(self.simulation.clock.now + 4 * fault.seconds)

    def _hang(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        if self._is_here(worker) and self._is_found(worker):
            self._hung.add(worker)
            threads.sleep(1e9)

    def _is_found(self, worker: WorkerProcess) -> bool:
        """Whether a hang can be told from long user code: not outside a world, and not if no other rank waits for it."""
        job = worker.job or current_job()
        if job is None or job.world is None or job.finished:
            return False
        members = {member.worker for member in job.world.members}
        return len(members) > 1 and not any(other.is_alive and other.number in members for other in self._hung)

    def _lose_control(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        for link in worker.links:
            link.lose()

    def _lag(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        for link in worker.links:
            link.lag = min(3.0, fault.seconds)
            self._later(fault, setattr, link, "lag", 0.0)

    def _black_hole(self, worker: WorkerProcess, fault: SimulatedFault) -> None:
        mesh = None if worker.group is None else worker.group._mesh
        if mesh is not None and worker.group is not None and worker.group.is_connected:
            mesh.swallowed.add(worker.group.rank)
            self.simulation.heals(self.simulation.clock.now + BLACK_HOLE_SECONDS)

    def _is_here(self, worker: WorkerProcess) -> bool:
        thread = threads._current
        return thread is not None and thread.process is worker and thread._greenlet is getcurrent()

    def _hold(self, worker: WorkerProcess) -> None:
        """Have a process that stops itself do so immediately, and not at its next wait."""
        if self._is_here(worker):
            threads.sleep(0.0)

    # ------------------------------------------------------------------ tasks

    def _kill_task(self, task: TaskProcess, fault: SimulatedFault) -> None:
        task.kill()

    def _stop_task(self, task: TaskProcess, fault: SimulatedFault) -> None:
        task.stop()
        self._later(fault, task.go_on)

    def _lose_task_control(self, task: TaskProcess, fault: SimulatedFault) -> None:
        for link in task.links:
            link.lose()

    def _break_warm_parent(self, task: TaskProcess, fault: SimulatedFault) -> None:
        if task.supervisor is not None:
            task.loop.call_soon(task.supervisor.break_warm_parent)

    # ------------------------------------------------------------------ executors

    def _drain(self, executor: Executor, fault: SimulatedFault) -> None:
        self._begin_drain(executor, None)
        self._later(fault, self.simulation.spark.replace, executor.machine)

    def _drain_by(self, executor: Executor, fault: SimulatedFault) -> None:
        self._begin_drain(executor, self.simulation.clock.now + fault.seconds)
        self._later(fault, self.simulation.spark.lose_executor, executor, fault.seconds / 2)

    def _begin_drain(self, executor: Executor, deadline: float | None) -> None:
        executor.is_draining = True
        self._watch_drain(executor, deadline)

    def _watch_drain(self, executor: Executor, deadline: float | None) -> None:
        """Do what the launcher does, which is to report each registered slot, and what Spark does, which is to wait for tasks."""
        simulation = self.simulation
        if simulation.is_over or not executor.is_alive:
            return
        if not executor.tasks and deadline is None:
            simulation.spark.drop_executor(executor)
            return
        for host in simulation.machine.job.hosts:
            if host.place.executor == executor.number:
                simulation.service.drain_slot(host.slot, deadline)
        simulation.clock.after(0.5, self._watch_drain, executor, deadline)

    def _lose_executor(self, executor: Executor, fault: SimulatedFault) -> None:
        self.simulation.heals(self.simulation.clock.now + fault.seconds)
        self.simulation.spark.lose_executor(executor, fault.seconds)

    def _block_ports(self, executor: Executor, fault: SimulatedFault) -> None:
        executor.is_blocked = True
        # The longest time for which worlds may fail to form without ending the job (UNFORMED_LIMIT).
        seconds = 20 + fault.seconds
        self.simulation.heals(self.simulation.clock.now + seconds)
        self.simulation.clock.after(seconds, self._open_ports, executor)

    def _open_ports(self, executor: Executor) -> None:
        executor.is_blocked = False
        self._unblock_meshes()

    # ------------------------------------------------------------------ machines

    def _freeze_machine(self, machine: Machine, fault: SimulatedFault) -> None:
        machine.is_frozen = True
        for process in machine.processes:
            process.stop()
        self._later(fault, self._thaw, machine)

    def _thaw(self, machine: Machine) -> None:
        machine.is_frozen = False
        for process in list(machine.processes):
            process.go_on()

    def _lose_machine(self, machine: Machine, fault: SimulatedFault) -> None:
        spark = self.simulation.spark
        if sum(not other.is_lost for other in spark.machines) == 1:
            return
        machine.is_lost = True
        self._cut_off(machine)
        for executor in [executor for executor in spark.executors if executor.machine is machine]:
            spark.lose_executor(executor, fault.seconds)
        self.simulation.heals(self.simulation.clock.now + 35.0)

    def _slow_machine(self, machine: Machine, fault: SimulatedFault) -> None:
        machine.slowness = 8.0
        self._later(fault, setattr, machine, "slowness", 1.0)

    def _cut(self, machine: Machine, fault: SimulatedFault) -> None:
        self._cut_off(machine)
        self._later(fault, self._reach_again, machine)

    def _cut_off(self, machine: Machine) -> None:
        machine.is_cut += 1
        for process in machine.processes:
            for link in process.links:
                link.cut()

    def _reach_again(self, machine: Machine) -> None:
        machine.is_cut -= 1
        if not machine.is_cut:
            for process in machine.processes:
                for link in process.links:
                    link.mend()

    def _isolate(self, machine: Machine, fault: SimulatedFault) -> None:
        machine.is_isolated = True
        self._later(fault, self._join_again, machine)

    def _join_again(self, machine: Machine) -> None:
        machine.is_isolated = False
        self._unblock_meshes()

    def _unblock_meshes(self) -> None:
        meshes, self.simulation.meshes = self.simulation.meshes, set()
        for mesh in sorted(meshes, key=lambda mesh: mesh.generation):
            mesh.unblock()

    def _unlist(self, machine: Machine, fault: SimulatedFault) -> None:
        names = [other.name for other in self.simulation.spark.machines]
        self.simulation.service.hosts_listed(dict.fromkeys(names))
        self.simulation.service.hosts_listed({name: None for name in names if name != machine.name})
        self._later(fault, self.simulation.service.hosts_listed, dict.fromkeys(names))

    # ------------------------------------------------------------------ the job

    def _fail_newcomers(self, fault: SimulatedFault) -> None:
        until = self.simulation.clock.now + 20 + 2 * fault.seconds
        self.simulation.newcomers_fail_until = max(self.simulation.newcomers_fail_until, until)
        self.simulation.heals(until)

    def newcomer_has_the_state(self, worker: WorkerProcess) -> None:
        """Let the newcomer raise, like code whose objects do not fit the state."""
        if self.simulation.clock.now < self.simulation.newcomers_fail_until:
            self.hit.add(worker)
            self.simulation.invariants.newcomer_fails(worker)
            raise InjectedError("the state does not fit")

    def _duplicate(self, fault: SimulatedFault) -> None:
        self.simulation.spark.duplicate(fault.pick)

    def _add_executor(self, fault: SimulatedFault) -> None:
        machines = [machine for machine in self.simulation.spark.machines if not machine.is_lost]
        self.simulation.spark.add_executor(machines[fault.pick % len(machines)])

    def _pause_driver(self, fault: SimulatedFault) -> None:
        driver = self.simulation.driver
        driver.stop()
        self._later(fault, driver.go_on)

    def _cancel(self, fault: SimulatedFault) -> None:
        self.simulation.service.cancel(JobCancelledError("run() was interrupted"))


_ON_THE_JOB = {Kind.EVALUATE, Kind.FAIL_NEWCOMERS, Kind.DUPLICATE, Kind.ADD_EXECUTOR, Kind.PAUSE_DRIVER, Kind.CANCEL}
_ON_A_TASK = {Kind.KILL_TASK, Kind.STOP_TASK, Kind.LOSE_TASK_CONTROL, Kind.BREAK_WARM_PARENT}
_ON_AN_EXECUTOR = {Kind.BLOCK_PORTS, Kind.DRAIN, Kind.DRAIN_BY, Kind.LOSE_EXECUTOR}
_ON_A_MACHINE = {Kind.FREEZE_MACHINE, Kind.LOSE_MACHINE, Kind.SLOW_MACHINE, Kind.CUT, Kind.ISOLATE, Kind.UNLIST}
