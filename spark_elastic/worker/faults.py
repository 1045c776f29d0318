"""Injected faults, worker side: named points of the protocol at which a fault of the job's plan may strike.

Without a plan each point costs one look at an empty tuple. ``spark_elastic.testing`` makes plans.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import psutil

from spark_elastic.protocol.fault_points import Action, Fault, InjectedFaultError, Point

_plan: tuple[Fault, ...] = ()


def _claim_nothing(number: int) -> bool:
    return False


_claim: Callable[[int], bool] = _claim_nothing


def arm(plan: tuple[Fault, ...], claim: Callable[[int], bool]) -> None:
    """Set the plan of this worker. ``claim`` asks the driver whether a fault has strikes left in this job."""
    global _plan, _claim
    _plan, _claim = plan, claim


def reached(point: Point, *, rank: int | None = None, step: int | None = None, generation: int | None = None) -> None:
    """Let a matching fault strike. May block, raise, or never return."""
    for fault in _plan:
        if (
            fault.point is point
            and fault.rank in (None, rank)
            and fault.step in (None, step)
            and fault.generation in (None, generation)
            and _claim(fault.number)
        ):
            _strike(fault)


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
            psutil.Process().parents()[1].kill()
            threading.Event().wait()
        case Action.DRAIN:
            pass  # the driver drains the host of whoever claims this
        case Action.KILL_EXECUTOR:
            next(process for process in psutil.Process().parents() if process.name().startswith("java")).kill()
            threading.Event().wait()
