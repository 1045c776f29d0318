"""Injected faults on the worker's side: named points of the protocol at which a fault of the job's plan may strike.

Without a plan each point costs one call. ``spark_elastic.testing`` makes plans.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from spark_elastic.protocol.fault_points import (
    EXECUTOR_VARIABLE,
    TASK_VARIABLE,
    Action,
    Fault,
    InjectedFaultError,
    Point,
)


class Injector:
    """Makes the faults of a plan strike. ``claim`` asks the driver whether a fault has strikes left in this job."""

    def __init__(self, plan: tuple[Fault, ...], claim: Callable[[int], bool]) -> None:
        self._plan = plan
        self._claim = claim

    def __call__(self, point: Point, rank: int | None, step: int | None, generation: int | None) -> None:
        """Let a matching fault strike. May block, raise, or never return."""
        for fault in self._plan:
            if (
                fault.point is point
                and fault.rank in (None, rank)
                and fault.step in (None, step)
                and fault.generation in (None, generation)
                and self._claim(fault.number)
            ):
                _strike(fault)


def _no_faults(point: Point, rank: int | None, step: int | None, generation: int | None) -> None: ...


_injector: Callable[[Point, int | None, int | None, int | None], None] = _no_faults


def arm(injector: Callable[[Point, int | None, int | None, int | None], None] = _no_faults) -> None:
    """Set the injector of this process; without an argument, no faults strike."""
    global _injector
    _injector = injector


def reached(point: Point, *, rank: int | None = None, step: int | None = None, generation: int | None = None) -> None:
    """Note that this worker has reached a named point of the protocol. May block, raise, or never return."""
    _injector(point, rank, step, generation)


def _strike(fault: Fault) -> None:
    me = os.getpid()
    match fault.action:
        case Action.KILL:
            os.kill(me, signal.SIGKILL)
        case Action.EXIT:
            os._exit(fault.code)
        case Action.SEGFAULT:
            os.kill(me, signal.SIGSEGV)
        case Action.RAISE:
            raise InjectedFaultError(f"injected at {fault.point.value}")
        case Action.STOP:
            os.kill(me, signal.SIGSTOP)
        case Action.HANG:
            threading.Event().wait()
        case Action.KILL_TASK:
            os.kill(int(os.environ[TASK_VARIABLE]), signal.SIGKILL)
            threading.Event().wait()
        case Action.DRAIN | Action.GIVE_BACK:
            pass  # the driver drains the host of the worker that claims this, or has the cluster give a seat back
        case Action.TAKE_AWAY:
            if fault.grace <= 0:
                threading.Event().wait()
        case Action.KILL_EXECUTOR:
            os.kill(int(os.environ[EXECUTOR_VARIABLE]), signal.SIGKILL)
            threading.Event().wait()
