"""Processes of simulated machines."""

from __future__ import annotations

from typing import Any

from simulation.world import threads
from simulation.world.clock import ProcessLoop
from simulation.world.machines import Machine
from simulation.world.universe import Universe


class Process:
    """Something that runs on a machine until it ends or is killed."""

    kind = "process"

    def __init__(self, simulation: Universe, machine: Machine, number: int) -> None:
        self.simulation = simulation
        self.machine = machine
        self.number = number
        self.loop = ProcessLoop(simulation.clock, self)
        self.threads: list[threads.Thread] = []
        self.links: list[Any] = []
        self.job: Any = None
        self.group: Any = None
        self.is_alive = True
        machine.processes.append(self)
        simulation.processes.append(self)

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"

    def unhandled(self, error: BaseException) -> None:
        """Note that the product has let an unhandled exception escape."""
        if self.is_alive:
            self.simulation.fail(f"{self}: unhandled {type(error).__name__}: {error}", error)

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.loop.is_stopped = True

    def go_on(self) -> None:
        """Let a stopped process continue, as SIGCONT does."""
        if self.is_alive and self.loop.is_stopped and not self.machine.is_frozen:
            self.loop.go_on()

    def kill(self, code: int = -9) -> None:
        """End the process at once; its sockets are closed once its memory is freed."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.loop.is_dead = True
        self.simulation.note("dies", self, f"code {code}")
        self.machine.processes.remove(self)
        clock, random = self.simulation.clock, self.simulation.random
        clock.soon(self._unwind)
        freed = random.uniform(0.2, 1.5) if random.random() < 0.1 else random.uniform(0.0005, 0.02)
        clock.after(freed, self._close_sockets)
        self._dying(code, freed)

    def _dying(self, code: int, freed: float) -> None:
        """Let the process's supervisor notice its end, ``freed`` seconds before it can be reaped."""

    def _unwind(self) -> None:
        for thread in self.threads:
            thread.end()
        self.threads.clear()
        self.loop.end()

    def _close_sockets(self) -> None:
        if self.machine.is_lost:
            return  # no goodbye is sent, so the connections are given up after a while
        for link in self.links:
            if link.client.open:
                link.client.open = False
                link.client._transmit(None)
        if self.group is not None:
            self.group.leave()
