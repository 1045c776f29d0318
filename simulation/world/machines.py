"""Machines and the executors that run on them."""

from __future__ import annotations

from typing import Any


class Machine:
    """A computer of the cluster. ``slowness`` multiplies all times on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.processes: list[Any] = []
        self.slowness = 1.0
        # How many faults cut it off from the driver, and whether it is cut off from other machines.
        self.is_cut = 0
        self.is_isolated = False
        self.is_frozen = False
        # Whether it is gone without a goodbye.
        self.is_lost = False


class Executor:
    def __init__(self, number: int, machine: Machine, cores: int) -> None:
        self.number = number
        self.machine = machine
        self.cores = cores
        self.tasks: list[Any] = []
        self.is_alive = True
        self.is_draining = False
        # Whether nobody can connect to new workers on the machine.
        self.is_blocked = False
