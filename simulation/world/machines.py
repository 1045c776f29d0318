"""Machines and the executors that run on them."""

from __future__ import annotations

from typing import Any


class Machine:
    """A computer of the cluster. ``slowness`` multiplies what takes time on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.processes: list[Any] = []
        self.slowness = 1.0
        # Cut off from the driver; from the other machines.
        self.is_cut = 0
        self.is_isolated = False
        self.is_frozen = False
        # Gone without a goodbye.
        self.is_lost = False


class Executor:
    def __init__(self, number: int, machine: Machine, cores: int) -> None:
        self.number = number
        self.machine = machine
        self.cores = cores
        self.tasks: list[Any] = []
        self.is_alive = True
        self.is_draining = False
        # Whether its new workers cannot be connected to.
        self.is_blocked = False
