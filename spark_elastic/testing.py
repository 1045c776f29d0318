"""Fault injection for tests: strike a worker at a given rank and step, or at a named point of the protocol.

::

    with spark_elastic.testing.inject(kill(rank=1, step=20), raise_error(rank=0, step=35)):
        spark_elastic.run(train_fn, min_np=2, max_np=4)

Faults are deterministic: no sleeping and hoping. ``step`` counts the explicit commits of the job from 1 on; by default a fault
strikes when the worker of that rank calls ``commit()`` for that step, before anything is saved. Each strikes once in a job
unless ``times`` says otherwise, whichever worker then has the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from msgspec.structs import replace

from spark_elastic.protocol.fault_points import Action, Fault, InjectedFaultError, Point

__all__ = [
    "Action",
    "Fault",
    "InjectedFaultError",
    "Point",
    "active_plan",
    "drain",
    "exit_with",
    "fault",
    "hang",
    "inject",
    "kill",
    "kill_executor",
    "kill_task",
    "raise_error",
    "segfault",
    "stop",
]

_active: ContextVar[tuple[Fault, ...]] = ContextVar("spark_elastic_faults", default=())


def fault(
    action: Action | str,
    *,
    rank: int | None = None,
    step: int | None = None,
    generation: int | None = None,
    at: Point | str = Point.COMMIT,
    times: int = 1,
    code: int = 1,
) -> Fault:
    """Describe a fault. ``at`` is a ``Point``; what is None matches every rank, step or generation."""
    return Fault(0, Action(action), Point(at), rank, step, generation, times, code)


kill = partial(fault, Action.KILL)
"""SIGKILL the worker's process."""
segfault = partial(fault, Action.SEGFAULT)
exit_with = partial(fault, Action.EXIT)
"""``os._exit(code)``."""
raise_error = partial(fault, Action.RAISE)
"""Raise ``InjectedFaultError`` in user code."""
stop = partial(fault, Action.STOP)
"""SIGSTOP the worker's process."""
hang = partial(fault, Action.HANG)
"""Never return from this point; the process stays responsive otherwise."""
kill_task = partial(fault, Action.KILL_TASK)
"""SIGKILL the Spark task's Python process."""
kill_executor = partial(fault, Action.KILL_EXECUTOR)
"""SIGKILL the executor's JVM."""
drain = partial(fault, Action.DRAIN)
"""Have the worker leave at a commit, as ahead of a decommission; when it has left, its slot is offered to Spark again."""


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Have the faults strike in every ``run`` that this thread starts inside the ``with``."""
    token = _active.set(tuple(replace(entry, number=number) for number, entry in enumerate(faults, 1)))
    try:
        yield
    finally:
        _active.reset(token)


def active_plan() -> tuple[Fault, ...]:
    """Return the faults that are to strike in a run that is started here."""
    return _active.get()
