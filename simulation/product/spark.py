"""Spark: its executors, one job of one task per slot, and the launcher that submits them."""

from __future__ import annotations

from typing import Any

from simulation.product.hosts import TaskProcess
from simulation.world.machines import Executor, Machine
from simulation.world.universe import Universe
from spark_elastic.launchers.base import refuse_to_strike
from spark_elastic.protocol.fault_points import Fault

MAX_FAILURES = 4


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number
        self.attempts: list[TaskProcess] = []
        self.failures = 0
        # Whether it waits in Spark's queue for a core.
        self.is_queued = False
        self.is_submitted = False
        self.resubmissions = 0


class Spark:
    """The cluster as our tasks see it. Lost executors are replaced after ``replace_seconds``."""

    def __init__(self, simulation: Universe, machines: int, executors: int, cores: int, slots: int) -> None:
        self.simulation = simulation
        self.machines = [Machine("abcdefgh"[number]) for number in range(machines)]
        self.executors: list[Executor] = []
        self.slots = [_Slot(number) for number in range(slots)]
        self.is_closing = False
        self._cores = cores
        self._executors = 0
        self._tasks = 0
        for number in range(executors):
            self.add_executor(self.machines[number % machines])

    # ------------------------------------------------------------------ the launcher

    def submit_all(self) -> None:
        for slot in self.slots:
            self._submit(slot)

    def slot_registered(self, number: int) -> None:
        self.slots[number].resubmissions = 0

    def slot_lost(self, number: int) -> None:
        """Do nothing: tasks that wait are known here."""

    def give_back(self) -> None:
        self.simulation.clock.soon(self._give_back)

    def strike(self, fault: Fault, slot: int) -> None:
        refuse_to_strike(fault)

    def _give_back(self) -> None:
        for slot in self.slots:
            slot.is_queued = False
            slot.is_submitted = False
        again = self.simulation.random.uniform(1.0, 6.0)
        for slot in self.slots:
            self.simulation.clock.after(again, self._submit, slot)

    def submit_no_more(self) -> None:
        self.is_closing = True
        for slot in self.slots:
            slot.is_queued = False

    def _submit(self, slot: _Slot) -> None:
        if not self.is_closing and not slot.is_submitted:
            slot.is_submitted, slot.failures, slot.is_queued = True, 0, True
            self.simulation.clock.after(self.simulation.random.uniform(0.01, 0.1), self.schedule)

    # ------------------------------------------------------------------ Spark's scheduler

    def schedule(self) -> None:
        for slot in self.slots:
            if slot.is_queued and not slot.attempts:
                executor = self._free_executor()
                if executor is None:
                    return
                slot.is_queued = False
                self._start(slot, executor)

    def duplicate(self, number: int) -> None:
        """Start a speculative attempt of a slot's task beside the running one."""
        executor = self._free_executor()
        slot = self.slots[number % len(self.slots)]
        if executor is not None and slot.attempts:
            self._start(slot, executor)

    @property
    def is_starved(self) -> bool:
        """Whether a slot waits for a core that another slot's speculative duplicate holds."""
        waits = any(slot.is_queued and not slot.attempts for slot in self.slots)
        return waits and any(len(slot.attempts) > 1 for slot in self.slots)

    def _free_executor(self) -> Executor | None:
        free = [
            executor
            for executor in self.executors
            if executor.is_alive and not executor.is_draining and len(executor.tasks) < executor.cores
        ]
        return self.simulation.random.choice(free) if free else None

    def _start(self, slot: _Slot, executor: Executor) -> None:
        task = TaskProcess(self.simulation, executor, self._tasks, slot.number, slot.failures)
        self._tasks += 1
        slot.attempts.append(task)
        executor.tasks.append(task)
        self.simulation.note(
            "starts", task, f"slot {slot.number} on executor {executor.number} ({executor.machine.name})"
        )

    def task_ended(self, task: TaskProcess, failed: bool) -> None:
        if task in task.executor.tasks:
            task.executor.tasks.remove(task)
        slot = self.slots[task.slot]
        if task not in slot.attempts:
            return
        slot.attempts.remove(task)
        clock, random = self.simulation.clock, self.simulation.random
        if failed:
            slot.failures += 1
            if slot.attempts:
                clock.after(random.uniform(0.2, 1.0), self.schedule)  # other slots may want its core
                return
            if slot.failures < MAX_FAILURES and slot.is_submitted and not self.is_closing:
                slot.is_queued = True
                clock.after(random.uniform(0.2, 1.0), self.schedule)
                return
        else:
            for other in list(slot.attempts):
                self.simulation.strikes.hit.add(other)
                other.kill()
            slot.attempts.clear()
        slot.is_submitted = slot.is_queued = False
        if not self.is_closing:
            slot.resubmissions += 1
            pause = min(0.5 * 2 ** (slot.resubmissions - 1), 10.0)
            clock.after(pause + random.uniform(0, 0.5), self._submit, slot)

    # ------------------------------------------------------------------ executors

    def add_executor(self, machine: Machine) -> Executor:
        executor = Executor(self._executors, machine, self._cores)
        self._executors += 1
        self.executors.append(executor)
        self.simulation.clock.after(0.01, self.schedule)
        return executor

    def lose_executor(self, executor: Executor, replaced_after: float) -> None:
        if not executor.is_alive:
            return
        executor.is_alive = False
        self.executors.remove(executor)
        self.simulation.note("is lost", f"executor {executor.number}", "")
        for task in list(executor.tasks):
            task.kill()
        self.simulation.clock.after(replaced_after, self.replace, executor.machine)

    def drop_executor(self, executor: Executor) -> None:
        """Remove a drained executor without tasks. The caller has arranged for a replacement if one is needed."""
        executor.is_alive = False
        self.executors.remove(executor)

    def replace(self, machine: Machine) -> None:
        """Start an executor in place of a lost one, on another machine if its machine was lost, too."""
        if machine.is_lost:
            machine = next(other for other in self.machines if not other.is_lost)
        self.add_executor(machine)

    def living(self) -> list[Any]:
        """The processes that are left."""
        return [process for machine in self.machines for process in machine.processes]
