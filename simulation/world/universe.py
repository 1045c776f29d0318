"""Universe: what the parts of a simulated world ask of the whole. The only one is ``simulation.job.Simulation``."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from typing import Any

from simulation.world.clock import Clock
from simulation.world.machines import Machine


class Universe:
    """Time, chance, the machines' processes, and the record of events. ``violation`` is the first thing that is wrong."""

    # Built on top of the world: the product's driver, Spark's cluster, the faults and the observers.
    schedule: Any
    driver: Any
    service: Any
    machine: Any
    door: Any
    spark: Any
    strikes: Any
    invariants: Any
    ledger: Any

    def __init__(self, seed: int, keep_history: bool) -> None:
        self.random = random.Random(seed ^ 0x5EED)
        self.clock = Clock()
        self.violation = ""
        self.history: list[str] | None = [] if keep_history else None
        self.disk: dict[Any, Any] = {}
        # The tensors of checkpoints that all ranks write together, by attempt and commit.
        self.tensors: dict[Any, dict[str, Any]] = {}
        self.points: Counter[str] = Counter()
        self.processes: list[Any] = []
        self.workers: dict[int, Any] = {}
        self.meshes: set[Any] = set()
        self.is_over = False
        # Commits that workers have made.
        self.commits = 0
        # Until when everything fails that is started again.
        self.newcomers_fail_until = 0.0
        self.faults_at: dict[str, list[Any]] = {}

    def mesh(self, generation: int, size: int) -> Any:
        """Return the connections among the ranks of a generation."""
        raise NotImplementedError

    def strike_at(self, point: str, worker: Any) -> None:
        """Let those faults strike that wait for this visit to the point."""
        raise NotImplementedError

    def heals(self, when: float) -> None:
        """Note until when a fault has consequences for which nobody is to blame."""
        raise NotImplementedError

    def delay(self, link: Any) -> float:
        """Return how long a frame takes."""
        raise NotImplementedError

    @staticmethod
    def is_cut(machine: Machine) -> bool:
        return machine.is_cut > 0

    def note(self, what: str, who: object, details: str) -> None:
        """Add a line to the history."""
        if self.history is not None:
            self.history.append(f"{self.clock.now - 100.0:9.4f}  {who!s:<12} {what} {details}")

    def fail(self, violation: str, error: BaseException | None = None) -> None:
        """Note the first thing that is wrong; the simulation ends there."""
        if not self.violation:
            self.violation = violation
            self.note("VIOLATION", "", violation)
            if error is not None and self.history is not None:
                self.history += "".join(traceback.format_exception(error)).splitlines()
